"""What many watch alike, encoded once for all of them.

A frame is made when somebody waits for it and the last one is old enough; so nothing is made while nobody looks, and a
hundred viewers cost one encoding and a hundred writes.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Final

import anyio

INTERVAL_S: Final = 1.0  # as often as a person reads figures
REST: Final = 20.0  # times what a frame took to make: at most a twentieth of the time is spent on making one
KEEP_ALIVE_S: Final = 15.0  # proxies close what is silent for longer, often after 30 or 60 seconds
MOST_KEPT: Final = 64  # subjects whose last frames are kept for who comes next

Make = Callable[[], Awaitable[tuple[bytes, bool]]]


class SharedFrames:
    """The frames of one subject; ``make`` returns the newest, and whether it is the last that there will be.

    Whoever waits first makes it; the others wait for that one, and get the same bytes.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._lock = anyio.Lock()
        self._frame: bytes | None = None
        self._is_last = False
        self._due_at = 0.0

    async def newest(self) -> tuple[bytes, bool]:
        """Return a frame that is at most as old as the interval, and whether it is the last; raise what ``make`` does.

        A viewer that goes away while it makes one leaves that to the next.
        """
        async with self._lock:
            began_at = anyio.current_time()
            if self._frame is None or (began_at >= self._due_at and not self._is_last):
                self._frame, self._is_last = await self._make()
                took_s = anyio.current_time() - began_at
                self._due_at = began_at + max(INTERVAL_S, REST * took_s)
            return self._frame, self._is_last

    @property
    def due_in_s(self) -> float:
        """In how many seconds a newer frame may be had."""
        return max(0.0, self._due_at - anyio.current_time())

    async def follow(self, is_closed: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Iterate over frames as they change, to the last or until ``is_closed``; empty bytes tell of long silence."""
        sent, silent_since = b"", anyio.current_time()
        while not is_closed():
            frame, is_last = await self.newest()
            if frame != sent:
                sent, silent_since = frame, anyio.current_time()
                yield frame
            elif anyio.current_time() - silent_since >= KEEP_ALIVE_S:
                silent_since = anyio.current_time()
                yield b""
            if is_last:
                return
            await anyio.sleep(self.due_in_s or INTERVAL_S)


class FramesBySubject:
    """The shared frames of each subject that was looked at lately; who follows an older one keeps it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, SharedFrames] = OrderedDict()

    def of(self, subject: Hashable, make: Make) -> SharedFrames:
        """Return the frames of a subject, made by ``make`` where there are none yet."""
        frames = self._kept.pop(subject, None) or SharedFrames(make)
        self._kept[subject] = frames
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return frames
