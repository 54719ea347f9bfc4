"""When which turn held which slot: decided without I/O, and written in the forms that people look at."""
