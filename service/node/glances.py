"""Views of jobs for watchers: many jobs with slightly old counts, or one with a page of conversations."""

from collections import OrderedDict
from datetime import datetime
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from service.conversations.callers import Caller
from service.conversations.document.job_document import (
    ConversationPlace,
    PostedHead,
    place_in,
    posted_conditions,
    posted_heads,
)
from service.conversations.job.job import JobId
from service.conversations.job.states import ENDED_JOBS
from service.errors import ConversationNotFound
from service.node.callers_turns import CallersTurns
from service.node.conversation_list import (
    WORDS,
    ListedConversation,
    ListPage,
    ListQuery,
    Sums,
    first_words,
    lines_of,
    page_of,
    texts_of,
)
from service.node.jobs import Jobs, JobView
from service.store import conversation_rows, job_rows, turn_rows
from service.store.awaited_turns import Which
from service.store.conversation_rows import ConversationRow
from service.store.store import Store
from service.store.turn_rows import TurnHead

MOST_KNOWN: Final = 8  # jobs
MOST_CHARS: Final = 16_000_000  # characters of all known jobs
FRESH_S: Final = 0.5
REST: Final = 20.0  # multiple of a refresh's duration until the next


class _Known:
    """A job that was opened: its posted heads, and the lines of its conversations at the last read."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.heads: list[PostedHead] | None = None
        self.until: list[str] = []
        self.chars = 0  # estimated characters kept
        self.lines: list[ListedConversation] = []
        self.due_at = 0.0
        self.is_final = False
        self._texts: list[str] | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the sums, so that all turns are counted again."""
        self.number, self.counted = -1, 0
        self._sums: dict[str, Sums] = {}

    def read(self, document: str) -> None:
        """Read the posted document."""
        self.heads, self.until = posted_heads(document, WORDS), posted_conditions(document, WORDS)
        conditions = {id(head.until): head.until for head in self.heads}  # usually one list for all conversations
        texts = [text for until in conditions.values() for text in until]
        texts += [text for head in self.heads for text in (head.prompt, *head.variables.values())]
        self.chars = 2 * sum(map(len, texts))

    def take(self, fresh: list[tuple[int, TurnHead]], rows: list[ConversationRow]) -> None:
        """Count new turns, and make the lines again."""
        for number, turn in fresh:
            self._sums.setdefault(turn.key.conversation_id, Sums()).add(turn)
            self.number, self.counted = number, self.counted + 1
        self.lines, self._texts = lines_of(rows, self._sums, self.heads or []), None

    def page(self, query: ListQuery, size: int) -> ListPage:
        """Return a page of the lines."""
        page = page_of(self.lines, self._searched, self.heads or [], query, size)
        return msgspec.structs.replace(page, until=self.until)

    def _searched(self) -> list[str]:
        if self._texts is None:
            self._texts = texts_of(self.lines, self.heads or [])
        return self._texts


class AwaitedGlance(msgspec.Struct, frozen=True, kw_only=True):
    """An awaited turn; ``words`` are the last words in its conversation, by ``said_by``."""

    job: JobId
    name: str
    conversation: str
    agent: str
    round: int
    since: datetime
    until: datetime | None
    said_by: str
    words: str


class Glances:
    """The views that watchers of many jobs share."""

    def __init__(self, store: Store, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs
        self._known: OrderedDict[JobId, _Known] = OrderedDict()  # the jobs opened last
        self._placing = anyio.Lock()
        # One thread for all watchers: the event loop shares the interpreter with it
        self._one = anyio.CapacityLimiter(1)

    def __repr__(self) -> str:
        return f"<Glances {self._jobs!r}>"

    async def at_newest(self, limit: int, caller: Caller) -> list[JobView]:
        """Return the newest jobs that a caller may see.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        owner = caller.owner
        listed = await self._store.read(job_rows.listed, None, limit, None, owner)
        return [self._jobs.view_of(stored, await self._jobs.tallies.recent(stored)) for stored in listed]

    async def into(self, job_id: JobId, query: ListQuery, size: int) -> tuple[JobView, ListPage]:
        """Return a job, and a page of ``size`` lines of its conversations.

        Raises:
            JobNotFound: the job does not exist.
            StoreUnavailable: the database is in trouble.
        """
        view = await self._jobs.get(job_id)  # first: if it has ended, all of its listed conversations have
        known = self._known.pop(job_id, None) or _Known()
        self._known[job_id] = known  # before the first await, so that all watchers share it
        is_final = view.stored.state in ENDED_JOBS
        async with known.lock:
            if known.heads is None:
                document = await self._store.read(job_rows.document, job_id)
                await anyio.to_thread.run_sync(known.read, document, limiter=self._one)
                self._forget_oldest()
            if not known.is_final and (is_final or anyio.current_time() >= known.due_at):
                await self._refresh(job_id, known)
                known.is_final = is_final
            return view, await anyio.to_thread.run_sync(known.page, query, size, limiter=self._one)

    def _forget_oldest(self) -> None:
        while len(self._known) > 1 and sum(known.chars for known in self._known.values()) > MOST_CHARS:
            self._known.popitem(last=False)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    async def _refresh(self, job_id: JobId, known: _Known) -> None:
        """Read new turns, once for all watchers of a job; a refresh takes a twentieth of a reader's time at most."""
        began_at = anyio.current_time()
        fresh, total = await self._store.read(turn_rows.heads, job_id, known.number)
        if known.counted + len(fresh) != total:  # another node has since stored one with a smaller number
            known.forget()
            fresh, total = await self._store.read(turn_rows.heads, job_id, known.number)
        rows = await self._store.read(conversation_rows.listed, job_id)
        await anyio.to_thread.run_sync(known.take, fresh, rows, limiter=self._one)
        ended_at = anyio.current_time()
        known.due_at = ended_at + max(FRESH_S, REST * (ended_at - began_at))

    async def awaited(self, callers: CallersTurns, caller: Caller, limit: int) -> list[AwaitedGlance]:
        """Return the turns that the caller may speak, the oldest first, with the words before each.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        which = Which(owner=caller.owner)
        turns = await callers.listed(which, 0, limit)
        places = [(turn.key.job_id, turn.key.conversation_id) for turn in turns]
        said = await self._store.read(turn_rows.last_heads, places)
        return [
            AwaitedGlance(
                job=turn.key.job_id,
                name=name,
                conversation=turn.key.conversation_id,
                agent=turn.key.agent_id,
                round=turn.key.round,
                since=turn.since_at,
                until=turn.until_at,
                said_by="" if head is None else head.key.agent_id,
                words="" if head is None else first_words(head.text),
            )
            for turn, (name, head) in zip(turns, said, strict=True)
        ]

    async def place(self, job_id: JobId, conversation_id: str) -> ConversationPlace:
        """Return a conversation's prompt and rounds as posted, and its neighbours.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
            StoreUnavailable: the database is in trouble.
        """
        async with self._placing:  # one at a time, since a document may have many megabytes
            document = await self._store.read(job_rows.document, job_id)
            found = await anyio.to_thread.run_sync(place_in, document, conversation_id, limiter=self._one)
        if found is None:
            raise ConversationNotFound(job_id, conversation_id)
        return found
