"""What every agent is told, and in which order. Pure."""
