"""Wakes tasks that wait for a change."""

from collections.abc import Callable

import anyio


class Notifier:
    """A repeated signal of change, for use within one event loop."""

    def __init__(self) -> None:
        self._next = anyio.Event()

    def __repr__(self) -> str:
        return f"<Notifier waiting={self._next.statistics().tasks_waiting}>"

    @property
    def next(self) -> anyio.Event:
        """The event of the next change; take it before you look at the state, and wait for it after."""
        return self._next

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        self._next.set()
        self._next = anyio.Event()

    async def wait(self) -> None:
        """Return at the next change."""
        await self._next.wait()

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return when ``is_so`` holds; it is checked at once, and after each change."""
        while not is_so():
            await self._next.wait()
