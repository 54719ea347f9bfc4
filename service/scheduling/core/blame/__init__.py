"""Who is suspected of an engine's death, and on what proof a turn is convicted. Pure."""
