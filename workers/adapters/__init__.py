"""LoRA adapters that come and go while a model's engines work."""
