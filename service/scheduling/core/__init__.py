"""What the scheduler decides. Pure: events in, actions out."""
