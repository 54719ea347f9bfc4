"""The HTTP surface of what a model's engines have loaded: weights and adapters."""
