"""Handles large documents in threads, one per key: threads share the interpreter with the event loop."""

from collections.abc import Callable
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from service.conversations.callers import Caller

SMALL_BYTES: Final = 16 * 1024  # up to this size the work is shorter than the start of a thread
T = TypeVar("T")


class LargeDocuments:
    """Gives each key one thread: with several, one key could slow the event loop several times over."""

    def __init__(self) -> None:
        self._limiters: WeakValueDictionary[str | None, anyio.CapacityLimiter] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<LargeDocuments keys={list(self._limiters)}>"

    async def handle(self, caller: Caller, function: Callable[..., T], *arguments: object) -> T:
        """Return a function's value for a document; runs in a thread, after other documents of the same key."""
        limiter = self._limiters.get(caller.name)
        if limiter is None:
            self._limiters[caller.name] = limiter = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(function, *arguments, limiter=limiter)

    async def handle_sized(self, caller: Caller, size: int, function: Callable[..., T], *arguments: object) -> T:
        """Return the same, without a thread for a document of at most ``SMALL_BYTES``."""
        if size <= SMALL_BYTES:
            return function(*arguments)
        return await self.handle(caller, function, *arguments)
