"""Pure decisions about workers: limits, states, placement and restarts."""
