"""The turns on each slot over time: computed without I/O, and written in formats for people."""
