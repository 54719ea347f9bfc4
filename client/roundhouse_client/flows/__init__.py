"""Calls of several requests, as generators without I/O: they yield steps, and a driver takes them."""
