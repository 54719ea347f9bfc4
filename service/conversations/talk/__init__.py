"""The course of a conversation: the order of turns, who hears whom, and the words of prompts. Pure."""
