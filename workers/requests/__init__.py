"""One request, from its slot to its answer."""
