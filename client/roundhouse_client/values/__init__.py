"""Roundhouse's answers as values: frozen, typed, each with its original JSON."""
