"""Places on devices that models come to and leave: their workers, their memory, and their swaps."""
