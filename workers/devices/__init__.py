"""The accelerators of a machine: what they are, and who says so."""
