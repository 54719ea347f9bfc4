"""Jobs as they are watched: all at once with counts that may be a little old, or one with a page of conversations."""

from collections import OrderedDict
from typing import Final

import anyio.to_thread

from service.conversations.callers import Caller
from service.conversations.job import JobId
from service.conversations.job_document import ConversationPlace, place_in, prompt_heads
from service.conversations.states import ConversationState
from service.errors import ConversationNotFound
from service.node.jobs import Jobs, JobView
from service.store import queries
from service.store.records import ConversationRow
from service.store.store import Store

HEAD_CHARS: Final = 160  # of a prompt, in a list
MOST_HEADS: Final = 8  # jobs


class Glances:
    """The glances that watchers of many jobs share."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs
        self._heads: OrderedDict[JobId, list[str]] = OrderedDict()  # of the jobs that were looked into last

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

    async def prompt_heads(self, job_id: JobId) -> list[str]:
        """Return the beginnings of a job's prompts, in the order of its conversations: they never change.

        Raises:
            JobNotFound: there is none.
            StoreUnavailable: the database is in trouble.
        """
        if job_id not in self._heads:
            document = await self._store.read(queries.document(job_id))
            self._heads[job_id] = await anyio.to_thread.run_sync(prompt_heads, document, HEAD_CHARS)
            while len(self._heads) > MOST_HEADS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(job_id)
        return self._heads[job_id]

    async def place(self, job_id: JobId, conversation_id: str) -> ConversationPlace:
        """Return a conversation's prompt and rounds as posted, and its neighbours.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
            StoreUnavailable: the database is in trouble.
        """
        document = await self._store.read(queries.document(job_id))
        found = await anyio.to_thread.run_sync(place_in, document, conversation_id)
        if found is None:
            raise ConversationNotFound(job_id, conversation_id)
        return found
