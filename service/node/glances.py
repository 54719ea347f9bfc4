"""Jobs as they are watched: all at once with counts that may be a little old, or one with a page of conversations.

A job of 10,000 conversations has some 100,000 rows to count, so what is counted for a list is counted no more often
than that is worth. Who asks for one job gets a new count (``Jobs.get``).
"""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from service.conversations.callers import Caller
from service.conversations.job import JobId
from service.conversations.states import ENDED_JOBS, ConversationState
from service.node.jobs import Jobs, JobView
from service.store import queries
from service.store.records import ConversationRow, StoredJob, Tally
from service.store.store import Store

REST: Final = 50.0  # times what a count took: at most 2 % of a reader's time goes to counting one job
MOST_KEPT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    tally: Tally
    is_final: bool  # the job had ended before it was counted
    due_at: float


class Glances:
    """What watchers of many jobs see."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs
        self._tallies = Tallies(store)

    def __repr__(self) -> str:
        return f"<Glances {self._tallies!r}>"

    async def at_newest(self, limit: int, caller: Caller) -> list[JobView]:
        """Return the newest jobs that a caller may know of.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        owner = None if caller.sees_all else caller.name
        listed = await self._store.read(queries.jobs(None, limit, None, owner))
        return [self._jobs.view_of(stored, await self._tallies.of(stored)) for stored in listed]

    async def into(
        self, job_id: JobId, state: ConversationState | None, after: int, limit: int
    ) -> tuple[JobView, list[ConversationRow]]:
        """Return a job, and its conversations after a place, those in one state or all.

        Raises:
            JobNotFound: there is none.
            StoreUnavailable: the database is in trouble.
        """
        view = await self._jobs.get(job_id)  # first: where it has ended, so have all that are listed
        return view, await self._store.read(queries.conversation_rows(job_id, state, after, limit))


class Tallies:
    """The counts of the jobs that were looked at last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counted: OrderedDict[JobId, _Counted] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Tallies of {len(self._counted)} jobs>"

    async def of(self, stored: StoredJob) -> Tally:
        """Return a job's count, which is older the longer a count takes; of a job that has ended it is exact.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        known = self._counted.get(stored.id)
        has_ended = stored.state in ENDED_JOBS
        if known is not None and (known.is_final or (not has_ended and time.monotonic() < known.due_at)):
            self._counted.move_to_end(stored.id)
            return known.tally
        began_at = time.monotonic()
        tally = await self._store.read(queries.tally(stored.id))
        ended_at = time.monotonic()
        due_at = ended_at + REST * (ended_at - began_at)
        self._counted[stored.id] = _Counted(tally=tally, is_final=has_ended, due_at=due_at)
        while len(self._counted) > MOST_KEPT:
            self._counted.popitem(last=False)
        return tally
