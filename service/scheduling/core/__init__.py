"""The scheduler's decisions. Pure: events in, actions out."""
