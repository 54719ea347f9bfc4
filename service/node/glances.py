"""Jobs as they are watched: all at once with counts that may be a little old, or one with a page of conversations."""

from service.conversations.callers import Caller
from service.conversations.job import JobId
from service.conversations.states import ConversationState
from service.node.jobs import Jobs, JobView
from service.store import queries
from service.store.records import ConversationRow
from service.store.store import Store


class Glances:
    """What watchers of many jobs see."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs

    def __repr__(self) -> str:
        return f"<Glances {self._jobs!r}>"

    async def at_newest(self, limit: int, caller: Caller) -> list[JobView]:
        """Return the newest jobs that a caller may know of.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        owner = None if caller.sees_all else caller.name
        listed = await self._store.read(queries.jobs(None, limit, None, owner))
        return [self._jobs.view_of(stored, await self._jobs.tallies.recent(stored)) for stored in listed]

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
