"""Cached tallies of jobs: of an ended job for good, of a running one for a moment.

A job of 10,000 conversations has some 100,000 rows to count, and a client that lists fifty such jobs asks repeatedly.
"""

import time
from collections import OrderedDict
from typing import Final

import msgspec

from service.conversations.job.job import JobId
from service.conversations.job.states import ENDED_JOBS
from service.store import job_rows
from service.store.records import StoredJob, Tally
from service.store.store import Store

# Multiple of a count's duration until the next: counting one job takes a reader 2 % of its time at most
REST: Final = 50.0
MOST_KEPT: Final = 1000


class _Counted(msgspec.Struct, frozen=True, kw_only=True):
    tally: Tally
    is_final: bool  # the job had ended before it was counted
    due_at: float


class Tallies:
    """The counts of the jobs that were read last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counted: OrderedDict[JobId, _Counted] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Tallies of {len(self._counted)} jobs>"

    async def now(self, stored: StoredJob) -> Tally:
        """Return a job's count, no older than ``stored``.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        known = self._known(stored)
        if known is not None and known.is_final:
            return known.tally
        return await self._count(stored)

    async def recent(self, stored: StoredJob) -> Tally:
        """Return a job's count, exact for an ended job; otherwise the longer a count takes, the longer it is used.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        known = self._known(stored)
        if known is not None and (known.is_final or time.monotonic() < known.due_at):
            return known.tally
        return await self._count(stored)

    def _known(self, stored: StoredJob) -> _Counted | None:
        """Return the cached tally of a job; None if the job has ended since."""
        known = self._counted.get(stored.id)
        if known is None or (stored.state in ENDED_JOBS and not known.is_final):
            return None
        self._counted.move_to_end(stored.id)
        return known

    async def _count(self, stored: StoredJob) -> Tally:
        began_at = time.monotonic()
        tally = await self._store.read(job_rows.tally, stored.id)
        ended_at = time.monotonic()
        due_at = ended_at + REST * (ended_at - began_at)
        self._counted[stored.id] = _Counted(tally=tally, is_final=stored.state in ENDED_JOBS, due_at=due_at)
        while len(self._counted) > MOST_KEPT:
            self._counted.popitem(last=False)
        return tally
