"""Whether an engine is alive, and what a dead one leaves behind."""
