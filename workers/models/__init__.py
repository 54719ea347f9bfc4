"""Models that Roundhouse fetches itself: where their files are found, and how they come."""
