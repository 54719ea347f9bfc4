"""The two ways to ask for a turn: composed from agents and words, or posted as a client's body."""
