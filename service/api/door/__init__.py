"""Bounds on connections, and the admission of callers."""
