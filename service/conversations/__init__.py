"""What a job is: agents, conversations, turns, who reads what, and how it is rendered. Pure."""
