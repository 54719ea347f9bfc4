"""One engine at one address: bytes to semantic events. Knows neither processes nor jobs."""
