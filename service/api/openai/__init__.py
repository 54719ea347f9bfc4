"""OpenAI's surface, and Anthropic's Messages: relayed to engines, not rebuilt."""
