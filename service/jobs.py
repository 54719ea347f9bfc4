"""Jobs as callers use them: posted, watched, read, cancelled, deleted; shared by the HTTP surface and the terminal."""

import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from service.conversations.job import Conversation, Job, JobId
from service.conversations.spec import Limits, parse_job
from service.conversations.states import ENDED_JOBS, ConversationState, JobState, TurnState
from service.conversations.transcript import transcript_document
from service.errors import ConversationNotFound, NoSlotAvailable, NotFinished, ShuttingDown
from service.scheduling.scheduler import Progress, Scheduler
from service.store import reading
from service.store.records import NewJob, StoredEvent, StoredJob, Tally
from service.store.sqlite import SqliteStore
from service.watch import JobWatch

EVENTS_A_READ = 500  # of one job, so that a watcher of a long job holds little at a time
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job with its counts, of one moment."""

    stored: StoredJob
    job: Job
    tally: Tally
    ready: int
    in_flight: int


class Jobs:
    """All jobs of this Roundhouse."""

    def __init__(
        self, store: SqliteStore, scheduler: Scheduler, watch: JobWatch, models: Sequence[str], limits: Limits
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._watch = watch
        self._models = models
        self._limits = limits
        self._is_closed = False

    def __repr__(self) -> str:
        """State whether jobs are taken."""
        return f"<Jobs closed={self._is_closed} {self._scheduler!r}>"

    @property
    def watch(self) -> JobWatch:
        """What tells of changes."""
        return self._watch

    def close(self) -> None:
        """Take no new jobs, and let whoever follows one go."""
        self._is_closed = True
        self._watch.close()

    async def recover(self) -> None:
        """Go on with the jobs that an earlier life of the service left unfinished."""
        for stored in await self._store.read(reading.unfinished_jobs()):
            job = _parse_stored(stored)
            missing = sorted({agent.model for agent in job.agents} - set(self._models))
            if missing:
                logger.warning("job %s waits for models that are configured no more: %s", job.id, ", ".join(missing))
            turns = await self._store.read(reading.turns(job.id))
            logger.info("job %s goes on with %d of %d turns done", job.id, len(turns), job.total_turns)
            self._scheduler.admit(job, turns)
            if stored.is_cancel_requested:
                self._scheduler.cancel(job.id)

    async def post(self, document: object, key: str | None = None, *, queue: bool = True) -> tuple[StoredJob, bool]:
        """Take a job; when this returns it is durable. Return it, and whether it is new.

        Raises:
            InvalidJob: with everything that is wrong with it.
            IdempotencyConflict: the key is another body's.
            NoSlotAvailable: with ``queue`` false, if a first turn would have to wait; nothing is stored then.
            ShuttingDown: no new jobs are taken.
        """
        if self._is_closed:
            raise ShuttingDown("the service is stopping and takes no new jobs")
        job = parse_job(document, JobId(f"job-{secrets.token_hex(8)}"), self._models, self._limits)
        if not queue and not self._scheduler.could_start_now(job):
            raise NoSlotAvailable("not every first turn can start at once")
        stored, is_new = await self._store.post(
            NewJob(
                id=job.id,
                name=job.name,
                document=canonical_json(document).decode(),
                conversations=tuple(conversation.id for conversation in job.conversations),
                body_hash=body_hash(document),
                idempotency_key=key,
                created_at=datetime.now(UTC),
            )
        )
        if is_new and not self._is_closed:  # closed meanwhile: it is stored, and the next life admits it
            self._scheduler.admit(job)
        return stored, is_new

    async def get(self, job_id: JobId) -> JobView:
        """Return a job.

        Raises:
            JobNotFound: there is none.
        """
        return await self._view(await self._store.read(reading.job(job_id)))

    async def page(self, state: JobState | None, limit: int, before: int | None) -> list[JobView]:
        """List jobs, the newest first."""
        return [await self._view(stored) for stored in await self._store.read(reading.jobs(state, limit, before))]

    async def transcript(self, job_id: JobId, conversation_id: str) -> dict[str, object]:
        """Return one conversation as it is so far, turns in flight with what they have said.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
        """
        stored = await self._store.read(reading.job(job_id))
        conversation = _parse_stored(stored).conversations_by_id.get(conversation_id)
        if conversation is None:
            raise ConversationNotFound(job_id, conversation_id)
        return await self._transcript(job_id, conversation, with_partial=True)

    async def ended_conversations(self, job_id: JobId) -> list[str]:
        """Return the ids of the conversations of a job that have ended."""
        talks = await self._store.read(reading.conversations(job_id))
        running = (ConversationState.QUEUED, ConversationState.RUNNING)
        return [talk.id for talk in talks if talk.state not in running]

    async def transcripts(self, job_id: JobId) -> AsyncIterator[dict[str, object]]:
        """Iterate over all transcripts of a job that has ended, one in memory at a time.

        Raises:
            JobNotFound: there is no such job.
            NotFinished: it has not ended.
        """
        job = await self.ended(job_id)
        for conversation in job.conversations:
            yield await self._transcript(job_id, conversation, with_partial=False)

    async def ended(self, job_id: JobId) -> Job:
        """Return a job that has ended.

        Raises:
            JobNotFound: there is no such job.
            NotFinished: it has not ended.
        """
        stored = await self._store.read(reading.job(job_id))
        if stored.state not in ENDED_JOBS:
            raise NotFinished(job_id, stored.state)
        return _parse_stored(stored)

    async def cancel(self, job_id: JobId) -> StoredJob:
        """Ask for the end of a job; it is durable that this was asked when this returns.

        Raises:
            JobNotFound: there is none.
        """
        stored = await self._store.request_cancel(job_id)
        self._scheduler.cancel(job_id)
        return stored

    async def delete(self, job_id: JobId) -> None:
        """Release all that is stored of a job.

        Raises:
            JobNotFound: there is none.
            NotEnded: it has not ended.
        """
        await self._store.delete(job_id)

    async def events_after(self, job_id: JobId, number: int) -> tuple[list[StoredEvent], bool]:
        """Return the next events of a job, and whether none will follow them.

        Raises:
            JobNotFound: there is none, or it was deleted.
        """
        events = await self._store.read(reading.events(job_id, number, EVENTS_A_READ))
        if events:
            return events, events[-1].kind == "end"
        stored = await self._store.read(reading.job(job_id))
        return [], stored.state in ENDED_JOBS

    def progress(self, job_id: JobId) -> Sequence[Progress]:
        """Return how far the turns of a job are that are in flight."""
        return self._scheduler.progress(job_id)

    async def _view(self, stored: StoredJob) -> JobView:
        tally = await self._store.read(reading.tally(stored.id))
        counts = self._scheduler.counts(stored.id)
        return JobView(
            stored=stored,
            job=_parse_stored(stored),
            tally=tally,
            ready=counts[TurnState.READY],
            in_flight=counts[TurnState.IN_FLIGHT],
        )

    async def _transcript(self, job_id: JobId, conversation: Conversation, *, with_partial: bool) -> dict[str, object]:
        # Looked at before the store: a turn that ends in between is then there twice, and the stored one stands.
        partial = self._scheduler.turns_in_flight(job_id, conversation.id) if with_partial else []
        turns = await self._store.read(reading.turns(job_id, conversation.id))
        states = {talk.id: talk for talk in await self._store.read(reading.conversations(job_id))}
        stored = states[conversation.id]
        ended = {turn.key for turn in turns}
        turns += [turn for turn in partial if turn.key not in ended and stored.state is ConversationState.RUNNING]
        return transcript_document(conversation, stored.state, stored.reason, turns)


def canonical_json(document: object) -> bytes:
    """Return the JSON of a document, the same bytes for the same content."""
    return msgspec.json.encode(document, order="deterministic")


def body_hash(document: object) -> str:
    """Return what tells one document from another."""
    return hashlib.sha256(canonical_json(document)).hexdigest()


def _parse_stored(stored: StoredJob) -> Job:
    """Return a stored job as it was accepted, whatever the configuration says by now."""
    document = msgspec.json.decode(stored.document)
    models = {agent["model"] for agent in document["agents"]}
    most = 2**62
    anything = Limits(body_bytes=most, depth=most, agents=most, conversations=most, rounds=most, turns=most)
    return parse_job(document, stored.id, models, anything)
