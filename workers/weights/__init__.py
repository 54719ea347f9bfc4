"""Weights that change while the engine talks: one update at a time for all workers of a model."""
