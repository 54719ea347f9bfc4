"""Jobs as callers use them: posted, watched, read, cancelled, deleted; shared by the HTTP surface and the terminal."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from service.conversations.callers import ANYBODY, Caller
from service.conversations.job import Job, JobId, TurnKind, new_job_id
from service.conversations.job_document import with_conversations
from service.conversations.job_faults import JobRules
from service.conversations.job_parser import check_schemas, parse_job
from service.conversations.states import ENDED_CONVERSATIONS, ENDED_JOBS, ConversationState, JobState, TurnState
from service.conversations.transcript import ConversationRecord, transcript_document, transcript_pieces
from service.errors import (
    Fault,
    InvalidJob,
    JobNotFound,
    NoSlotAvailable,
    NotFinished,
    ShuttingDown,
    StoreUnavailable,
)
from service.formats.documents import digest_of
from service.node.followers import JobFollowers
from service.node.intake import Intake
from service.node.large_documents import LargeDocuments
from service.node.queue_bounds import QueueBounds
from service.node.sources import Sources, with_prompts
from service.node.status import removed, unloaded
from service.node.tallies import Tallies
from service.node.tool_catalog import ToolCatalog
from service.scheduling.jobs.turn_record import Progress
from service.scheduling.scheduler import Scheduler
from service.store import deliveries, given_up, queries
from service.store.news import Neighbours
from service.store.records import GivenUp, NewJob, StoredEvent, StoredJob, Tally
from service.store.store import Store
from workers.lanes.swap_log import Swap

SMALL_BYTES: Final = 16 * 1024  # of a body or a job that is looked at sooner than a thread would take it up
LOOK_S: Final = 0.5  # between two looks at a job that somebody waits for
EVENTS_A_READ: Final = 500  # of one job, so that a watcher of a long job holds little at a time


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its counts."""

    stored: StoredJob
    tally: Tally
    ready: int
    in_flight: int
    waits_for: Sequence[str] = ()  # what only an operator brings


class Jobs:
    """All jobs of this Roundhouse."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        intake: Intake,
        watch: JobFollowers,
        neighbours: Neighbours,
        rules: Callable[[], JobRules],
        catalog: ToolCatalog,
    ) -> None:
        self.watch = watch
        self.large = LargeDocuments()
        self.tallies = Tallies(store)
        self._store = store
        self._scheduler = scheduler
        self._intake = intake
        self._neighbours = neighbours
        self._rules = rules
        self._catalog = catalog
        self._sources = Sources(store, lambda: rules().adapters)
        self.bounds = QueueBounds(store, scheduler)
        self._promised: Counter[str] = Counter()  # slots, by model, of jobs that are being stored with queue=false
        self._takings: set[anyio.Event] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Jobs closed={self._is_closed} {self._scheduler!r}>"

    def close(self) -> None:
        """Take no new jobs, and release all followers."""
        self._is_closed = True
        self.watch.close()

    # Posting

    async def post(
        self,
        document: object,
        key: str | None = None,
        *,
        queue: bool = True,
        size: int = SMALL_BYTES,
        caller: Caller = ANYBODY,
    ) -> tuple[StoredJob, bool]:
        """Take a job of a caller; when this returns it is durable. Return it, and whether it is new.

        ``size`` is how many bytes it came in: of more than a few, what is to be done with it is done in a thread.

        Raises:
            InvalidJob: with everything that is wrong with it.
            IdempotencyConflict: the key is another body's.
            NoSlotAvailable: with ``queue`` false, if a first turn would have to wait; nothing is stored then.
            ShuttingDown: no new jobs are taken.
            ToolServerDown: an MCP server whose tools it asks for was never reached.
            StoreUnavailable: the store is in trouble.
            TooMuchQueued: as many turns of the caller wait as may.
            JobNotFound: a conversation is from one of a job that is not there, or not the caller's to read.
            ConversationNotFound: it is from one that is not there.
        """
        is_small = size <= SMALL_BYTES
        text, hashed = _written(document) if is_small else await self.large.handle(caller, _written, document)
        now = datetime.now(UTC)
        if key is not None:
            key = caller.own_key(key)
            # Before anything is judged: what was accepted stays accepted, whatever limits and slots say by now.
            stored = await self._store.read(queries.job_by_key(key, hashed, now))
            if stored is not None:
                return stored, False
        if self._is_closed:
            raise ShuttingDown("the service is stopping and takes no new jobs")
        if self._store.trouble is not None:
            raise StoreUnavailable(self._store.trouble)
        with self._taking():
            return await self._take(document, text, hashed, key, now, caller, queue=queue)

    async def _take(
        self, document: object, text: bytes, hashed: str, key: str | None, now: datetime, caller: Caller, *, queue: bool
    ) -> tuple[StoredJob, bool]:
        rules = self._rules()
        await check_schemas(document, rules.limits, is_small=len(text) <= SMALL_BYTES)
        sources = await self._sources.read(document, caller, rules.limits.body_bytes)
        written = with_prompts(await self._catalog.expand(document), sources, rules.limits.body_bytes)
        if written is not document:  # a job keeps the schemas that it was posted with
            document, text = written, await self.large.handle(caller, msgspec.json.encode, written)
            await check_schemas(document, rules.limits, is_small=len(text) <= SMALL_BYTES)
        said, is_small = (document, new_job_id(), rules), len(text) <= SMALL_BYTES
        job = parse_job(*said) if is_small else await self.large.handle(caller, parse_job, *said)
        begun = await self._sources.inherit_turns(_owned(job, caller), document, sources, rules.limits.turns)
        job = begun.job
        new = NewJob(
            job=job,
            shares=begun.shares,
            inherited=begun.inherited,
            words=begun.words,
            document=text.decode(),
            body_hash=hashed,
            idempotency_key=key,
            key_until=now + timedelta(seconds=rules.key_s) if key is not None else None,
            created_at=now,
        )
        async with self.bounds.hold(caller, job.total_turns, begun.turns):
            if queue:
                return await self._intake.post(new, claims=self._intake.has_room_for(job))
            with self._promise(job):
                return await self._intake.post(new, claims=True)

    @contextmanager
    def _taking(self) -> Iterator[None]:
        taken = anyio.Event()
        self._takings.add(taken)
        try:
            yield
        finally:
            self._takings.discard(taken)
            taken.set()

    async def wait_settled(self) -> None:
        """Return when every job that is being taken or read back at this moment is on the scheduler, or refused."""
        for taken in list(self._takings):
            await taken.wait()
        await self._intake.wait_admitted()

    @contextmanager
    def _promise(self, job: Job) -> Iterator[None]:
        """Hold the slots of a job's first turns against other jobs of its kind, from the check to its admission."""
        wanted = job.first_turns
        if not all(self._scheduler.free(model) - self._promised[model] >= count for model, count in wanted.items()):
            raise NoSlotAvailable("not every first turn can start at once")
        self._promised += wanted
        try:
            yield
        finally:
            self._promised -= wanted

    # Looking

    def view_of_new(self, stored: StoredJob) -> JobView:
        """Return a job that was stored this very moment: nothing of it can have ended."""
        return self.view_of(stored, Tally(conversations={}, turns={}))

    def view_of(self, stored: StoredJob, tally: Tally) -> JobView:
        """Return a job with what of it has ended, and with what is ready or in flight now, on whichever node."""
        counts = self._scheduler.view.of_job(stored.id)
        ready, in_flight = self._neighbours.counts(stored.id)
        return JobView(
            stored=stored,
            tally=tally,
            ready=counts[TurnState.READY] + ready,
            in_flight=counts[TurnState.IN_FLIGHT] + in_flight,
            waits_for=self._missed_by(stored.id),
        )

    async def deliveries(self, job_id: JobId) -> list[dict[str, object]]:
        """Return the state of each message to the job's caller.

        Raises:
            JobNotFound: there is none.
        """
        await self._store.read(queries.job(job_id))
        return await self._store.read(deliveries.of_job(job_id))

    async def get(self, job_id: JobId) -> JobView:
        """Return a job.

        Raises:
            JobNotFound: there is none.
        """
        return await self._view(await self._store.read(queries.job(job_id)))

    async def check_seen(self, job_id: JobId, caller: Caller) -> None:
        """Return where a caller may know of a job.

        Raises:
            JobNotFound: there is none, or it is another's: a caller is not to find out which.
        """
        if not caller.sees_all and not caller.sees(await self._store.read(queries.owner(job_id))):
            raise JobNotFound(job_id)

    async def page(
        self, state: JobState | None, limit: int, before: int | None, caller: Caller = ANYBODY
    ) -> list[JobView]:
        """List the jobs that a caller may know of, the newest first."""
        owner = caller.owner
        listed = await self._store.read(queries.jobs(state, limit, before, owner))
        return [await self._view(stored) for stored in listed]

    async def events_after(self, job_id: JobId, number: int) -> tuple[list[StoredEvent], bool]:
        """Return the next events of a job, and whether none will follow them.

        Raises:
            JobNotFound: there is none, or it was deleted.
        """
        return await self._store.read(queries.events(job_id, number, EVENTS_A_READ))

    def progress(self, job_id: JobId) -> Sequence[Progress]:
        """Return how far the turns of a job are that are in flight."""
        return self._scheduler.turns.progress(job_id)

    def swaps(self, job_id: JobId) -> Sequence[Swap]:
        """Return the newest loads of a job's models on lanes."""
        return self._scheduler.swaps(job_id)

    # Reading

    async def transcript(self, job_id: JobId, conversation_id: str) -> dict[str, object]:
        """Return one conversation as it is so far, turns in flight with what they have said.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
        """
        return transcript_document(await self._conversation(job_id, conversation_id))

    async def transcript_json(self, job_id: JobId, conversation_id: str, after: int = 0) -> Iterator[bytes]:
        """Return the same as JSON, in pieces, without the first ``after`` turns that have ended.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
        """
        return transcript_pieces(await self._conversation(job_id, conversation_id, after))

    async def _conversation(self, job_id: JobId, conversation_id: str, after: int = 0) -> ConversationRecord:
        # Looked at before the store: a turn that ends in between is then there twice, and the stored one stands.
        partial = self._scheduler.turns.of_conversation(job_id, conversation_id)
        conversation = await self._store.read(queries.conversation(job_id, conversation_id, after))
        ended = {turn.key for turn in conversation.turns if turn.kind is TurnKind.TURN}
        turns = [*conversation.turns, *(turn for turn in partial if turn.key not in ended)]
        return replace(conversation, turns=turns)

    async def document(self, job_id: JobId, which: Literal["all", "none"] | ConversationState) -> bytes:
        """Return the JSON of a job as it was posted, with all of its conversations, none, or those in a state.

        Raises:
            JobNotFound: there is none.
        """
        text = await self._store.read(queries.document(job_id))
        if which == "all":
            return text.encode()
        states = {} if which == "none" else await self._store.read(queries.conversation_states(job_id))
        wanted = {name for name, state in states.items() if state == which}
        return await anyio.to_thread.run_sync(with_conversations, text, wanted)

    async def ended_conversations(self, job_id: JobId) -> list[str]:
        """Return the ids of the conversations of a job that have ended."""
        states = await self._store.read(queries.conversation_states(job_id))
        return [name for name, state in states.items() if state in ENDED_CONVERSATIONS]

    async def given_up(self, job_id: JobId) -> list[GivenUp]:
        """Return the patterns and schemas of a job that ran out of time too often."""
        return await self._store.read(given_up.of_job(job_id))

    async def transcripts(self, job_id: JobId) -> AsyncIterator[Iterator[bytes]]:
        """Iterate over the JSON of all transcripts of a job that has ended, one in memory at a time."""
        for conversation_id in await self._store.read(queries.conversation_states(job_id)):
            yield await self.transcript_json(job_id, conversation_id)

    async def wait_ended(self, job_id: JobId, limit_s: float) -> None:
        """Return when a job has ended, after ``limit_s``, or when the service stops.

        Raises:
            JobNotFound: there is none, or it was deleted meanwhile.
        """
        until = anyio.current_time() + limit_s
        while not self.watch.is_closed:
            change = self.watch.next_change_towards_end(job_id)
            is_over = (await self._store.read(queries.job(job_id))).state in ENDED_JOBS
            left_s = until - anyio.current_time()
            if is_over or left_s <= 0:
                return
            with anyio.move_on_after(min(LOOK_S, left_s)):  # another node may run it, and wakes nobody here
                await change.wait()

    async def ended(self, job_id: JobId) -> StoredJob:
        """Return a job that has ended.

        Raises:
            JobNotFound: there is no such job.
            NotFinished: it has not ended.
        """
        stored = await self._store.read(queries.job(job_id))
        if stored.state not in ENDED_JOBS:
            raise NotFinished(job_id, stored.state)
        return stored

    # Ending

    async def cancel(self, job_id: JobId) -> StoredJob:
        """Ask for the end of a job; it is durable that this was asked when this returns.

        Raises:
            JobNotFound: there is none.
        """
        stored = await self._store.request_cancel(job_id)
        self._intake.cancel(job_id)
        return stored

    async def delete(self, job_id: JobId, *, with_heirs: bool = False) -> None:
        """Release all that is stored of a job; ``with_heirs`` the jobs that have inherited of it too.

        Jobs of another key that have are cancelled: what they have inherited is gone.

        Raises:
            JobNotFound: there is none.
            NotEnded: it has not ended, or one of the heirs.
        """
        for heir in await self._store.delete(job_id, with_heirs=with_heirs):
            self._intake.cancel(heir)

    async def _view(self, stored: StoredJob) -> JobView:
        return self.view_of(stored, await self.tallies.now(stored))

    def _missed_by(self, job_id: JobId) -> Sequence[str]:
        wanted = self._scheduler.view.models_of(job_id)
        if not wanted:
            return ()
        gone = [removed(model) for model in sorted(wanted - set(self._rules().models))]
        return [*gone, *(unloaded(model) for model in sorted(wanted & self._scheduler.unloaded))]


def _owned(job: Job, caller: Caller) -> Job:
    """Return a job as the caller's own.

    Raises:
        InvalidJob: its priority is above what the caller may give.
    """
    if caller.max_priority is not None and job.priority > caller.max_priority:
        message = f"{job.priority} is above this key's max_priority, {caller.max_priority}"
        raise InvalidJob([Fault(path="priority", message=message)])
    return replace(job, owner=caller.name)


def _written(document: object) -> tuple[bytes, str]:
    """Return the JSON of a document in its author's order, which prompts show, and its hash, which knows no order."""
    return msgspec.json.encode(document), digest_of(document)
