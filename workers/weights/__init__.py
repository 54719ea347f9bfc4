"""Weights that change while the engine runs: one update at a time for all workers of a model."""
