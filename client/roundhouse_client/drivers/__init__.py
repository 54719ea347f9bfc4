"""What sends requests and waits: one driver for ordinary code, one for asyncio, and what both need."""
