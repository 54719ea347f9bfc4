"""A plain implementation of the specification of jobs that knows nothing of the program: see ``reading``."""
