"""Tools: what a model may call, how its calls are read, run and answered, and what of them is kept."""
