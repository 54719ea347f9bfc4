"""LoRA adapters that are loaded and unloaded while a model's engines run."""
