"""Models that Roundhouse fetches itself: where their files are, and how they are fetched."""
