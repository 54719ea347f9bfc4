"""Calls of more than one request, as generators that do no I/O: they yield steps, and a driver takes them."""
