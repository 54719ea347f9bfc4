"""The turns that are ready, and their order. Pure."""
