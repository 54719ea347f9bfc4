"""Every request to Roundhouse as one value: its path, its body, and the reader of its answer."""
