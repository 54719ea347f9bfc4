"""Jobs: agents, conversations, turns, visibility, and how prompts are rendered. Pure."""
