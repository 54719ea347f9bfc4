"""A job's document: its form, its faults, and the job that it becomes. Pure."""
