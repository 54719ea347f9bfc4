"""Drivers that send requests and wait: one for ordinary code, one for asyncio, and their common parts."""
