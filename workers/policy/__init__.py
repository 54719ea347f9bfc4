"""Limits and when they are outrun. Pure."""
