"""The parts of every agent's prompt, and their order. Pure."""
