"""Whether an engine is alive, and the record of a dead one."""
