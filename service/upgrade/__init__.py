"""Upgrade in place: the service replaces its own program, and its engines stay."""
