"""Roundhouse's answers as values: frozen, typed, each with the JSON that it was read from."""
