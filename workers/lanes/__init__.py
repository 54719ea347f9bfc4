"""Places on devices that models come to and leave: which there are, what fits them, and who goes where."""
