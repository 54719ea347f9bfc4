"""Tools: their definitions, how calls are read, run and answered, and the records of them."""
