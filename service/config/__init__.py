"""The configuration: its schema, its file, and the workers that follow from it."""
