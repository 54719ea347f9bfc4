"""The commands, a file for each or for a group of them."""
