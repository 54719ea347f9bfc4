"""OpenAI's API, and Anthropic's Messages: relayed to engines, not rebuilt."""
