"""Bounds on the waiting turns and requests of each key (``queued``), over all nodes and restarts.

The store counts waiting turns: unfinished ones, except those on slots. Between two looks only posts are added. So the
count is never too small on a lone node, and at most a second old otherwise.

Source: specification, "Rates and bounds of keys".
"""

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from service.conversations.callers import Caller
from service.errors import Fault, InvalidJob, TooMuchQueued
from service.scheduling.scheduler import Scheduler
from service.store import usage
from service.store.store import Store

LOOK_S: Final = 1.0


class QueueBounds:
    """The counts of waiting turns by key; written by posts, in the event loop."""

    def __init__(self, store: Store, scheduler: Scheduler) -> None:
        self._store = store
        self._scheduler = scheduler
        self._waiting: dict[str, int] = {}  # at the last look, with posts since
        self._looked_at: dict[str, float] = {}
        self._posted: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()  # turns that are being posted
        self._asked: Counter[str] = Counter()  # requests that are being checked

    def __repr__(self) -> str:
        return f"<QueueBounds {self._waiting}>"

    @asynccontextmanager
    async def hold(self, caller: Caller, turns: int, inherited: int = 0) -> AsyncIterator[None]:
        """Count turns that a caller posts within the block; if it fails, they are not counted.

        Inherited turns count too, until their conversations have ended.

        Raises:
            InvalidJob: they are more than may ever wait.
            TooMuchQueued: too many turns wait at the moment.
        """
        if caller.queued is None or caller.name is None:
            yield
            return
        whole = turns + inherited
        if whole > caller.queued:
            what = f"{turns} turns and {inherited} that are inherited" if inherited else f"{turns} turns"
            message = f"{what} are more than this key may have waiting, {caller.queued}"
            raise InvalidJob([Fault(path="conversations", message=message)])
        self._coming[caller.name] += whole
        try:
            await self._check(caller.name, caller.queued)
            yield
            self._posted[caller.name] += whole
            self._waiting[caller.name] += whole
        finally:
            self._coming[caller.name] -= whole

    async def check_request(self, caller: Caller) -> None:
        """Check that one more request of a caller may wait beside its turns.

        Raises:
            TooMuchQueued: too many turns wait at the moment.
        """
        if caller.queued is None or caller.name is None:
            return
        self._asked[caller.name] += 1
        try:
            await self._check(caller.name, caller.queued)
        finally:
            self._asked[caller.name] -= 1

    async def _check(self, name: str, most: int) -> None:
        coming = self._coming[name]  # from before the look: turns stored meanwhile are in both
        now = time.monotonic()
        is_old = now - self._looked_at.get(name, -LOOK_S) >= LOOK_S
        if is_old or self._waiting[name] + coming + self._requests_of(name) > most:
            posted = self._posted[name]
            unfinished = await self._store.read(usage.unfinished_of, name)
            since = self._posted[name] - posted  # these may be counted twice
            self._waiting[name] = unfinished - self._in_flight_of(name) + since
            self._looked_at[name] = now
        waiting = self._waiting[name] + coming + self._requests_of(name)
        if waiting > most:
            raise TooMuchQueued(f"with these {waiting} turns of {name} would wait, and {most} may (queued)")

    def _requests_of(self, name: str) -> int:
        """Count requests that wait, or are being checked: one that waits since the look is in one of both."""
        return self._asked[name] + self._scheduler.requests.queue.waiting_of(name)

    def _in_flight_of(self, name: str) -> int:
        in_flight = self._scheduler.view.in_flight_by_job().items()
        requests = self._scheduler.requests
        jobs = ((job_id, count) for job_id, count in in_flight if job_id not in requests)
        return sum(count for job_id, count in jobs if self._scheduler.works.owner(job_id) == name)
