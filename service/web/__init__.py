"""The dashboard: a page that browsers read, and its files."""
