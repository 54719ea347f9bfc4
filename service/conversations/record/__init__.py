"""The record of a conversation: turns, their measures, and what a fork inherits of them. Pure."""
