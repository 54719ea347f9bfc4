"""Handles large documents in threads, one of each key at a time: threads share the interpreter with the event loop."""

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from service.conversations.callers import Caller

T = TypeVar("T")


class LargeDocuments:
    """Gives each key a thread of its own. Several of one key would slow the event loop as many times as there are."""

    def __init__(self) -> None:
        self._limiters: WeakValueDictionary[str | None, anyio.CapacityLimiter] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<LargeDocuments keys={list(self._limiters)}>"

    async def handle(self, caller: Caller, function: Callable[..., T], *arguments: object) -> T:
        """Return the value that a function returns for a document; it runs in a thread, after those of the same key."""
        limiter = self._limiters.get(caller.name)
        if limiter is None:
            self._limiters[caller.name] = limiter = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(function, *arguments, limiter=limiter)
