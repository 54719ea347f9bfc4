"""Counts the requests that this node has passed on to others, so that a shutdown waits for them."""

from workers.notifier import Notifier


class Passing:
    """The number of requests that are under way at other nodes."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = Notifier()

    def __repr__(self) -> str:
        return f"<Passing {self.count}>"

    async def wait_none(self) -> None:
        """Return when none is under way; the caller bounds it."""
        await self.changed.wait_until(lambda: not self.count)
