"""Reading prompts beforehand, where slots are idle."""
