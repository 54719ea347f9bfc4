"""The embedded engine: llama.cpp's server in a program of ours, and a model generated on the spot."""
