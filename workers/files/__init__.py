"""Files: replaced at once, and the headers of safetensors."""
