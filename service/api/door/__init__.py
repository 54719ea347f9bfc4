"""What a connection may take of us, and who may ask."""
