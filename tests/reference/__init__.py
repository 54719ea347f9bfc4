"""A plain reading of the specification of jobs, which knows nothing of the program: see ``reading``."""
