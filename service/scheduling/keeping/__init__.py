"""The two ways to keep a turn: recorded in the store, or passing, for a client that waits."""
