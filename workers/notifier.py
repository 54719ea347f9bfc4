"""Wakes tasks that wait for a change."""

from collections.abc import Callable

import anyio


class Notifier:
    """A change that is told again and again; for use within one event loop."""

    def __init__(self) -> None:
        self._next = anyio.Event()

    def __repr__(self) -> str:
        return f"<Notifier waiting={self._next.statistics().tasks_waiting}>"

    @property
    def next(self) -> anyio.Event:
        """The event of the next change; take it before you look, and wait for it after."""
        return self._next

    def notify(self) -> None:
        """Wake everybody who waits now."""
        self._next.set()
        self._next = anyio.Event()

    async def wait(self) -> None:
        """Return at the next change."""
        await self._next.wait()

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return when ``is_so`` holds; it is asked at once, and after each change."""
        while not is_so():
            await self._next.wait()
