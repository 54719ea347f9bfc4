"""How much of a KV cache turns take, in tokens, and what has room for them."""
