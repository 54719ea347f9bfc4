"""One node: its jobs, its workers, its place among others."""
