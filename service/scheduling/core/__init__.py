"""The scheduler's decisions: events in, actions out. Pure."""
