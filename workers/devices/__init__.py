"""The accelerators of a machine, and the programs that report them."""
