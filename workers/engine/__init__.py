"""One engine, from its start to the proof that nothing of its process tree is left."""
