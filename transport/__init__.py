"""Client of one engine at one address: bytes in, semantic events out. Knows neither processes nor jobs."""
