"""Files: atomic replacement, and the headers of model files."""
