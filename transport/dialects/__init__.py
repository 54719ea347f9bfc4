"""The dialects of engines' servers."""
