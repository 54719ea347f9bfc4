"""Stored jobs for callers: watched, read, cancelled, deleted; used by HTTP and the terminal."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from service.conversations.callers import ANYBODY, Caller
from service.conversations.document.job_document import with_conversations
from service.conversations.document.job_faults import JobRules
from service.conversations.job.job import JobId, TurnKind
from service.conversations.job.states import ENDED_CONVERSATIONS, ENDED_JOBS, ConversationState, JobState, TurnState
from service.conversations.record.transcript import ConversationRecord, transcript_document, transcript_pieces
from service.errors import JobNotFound, NotFinished
from service.node.followers import JobFollowers
from service.node.intake import Intake
from service.node.status import removed, unloaded
from service.node.tallies import Tallies
from service.scheduling.scheduler import Scheduler
from service.scheduling.turn_record import Progress
from service.store import conversation_rows, deliveries, event_rows, job_rows
from service.store.news import Neighbours
from service.store.records import GivenUp, StoredEvent, StoredJob, Tally
from service.store.store import Store
from workers.lanes.swap_log import Swap

LOOK_S: Final = 0.5  # seconds between two looks at a job that a caller waits for
EVENTS_A_READ: Final = 500  # events of one job, so that a watcher of a long job holds few at a time


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its counts."""

    stored: StoredJob
    tally: Tally
    ready: int
    in_flight: int
    waits_for: Sequence[str] = ()  # reasons that only an operator can remove


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
    ) -> None:
        self.watch = watch
        self.tallies = Tallies(store)
        self._store = store
        self._scheduler = scheduler
        self._intake = intake
        self._neighbours = neighbours
        self._rules = rules

    def __repr__(self) -> str:
        return f"<Jobs {self._scheduler!r}>"

    # Looking

    def view_of_new(self, stored: StoredJob) -> JobView:
        """Return a job that has just been stored, without ended turns."""
        return self.view_of(stored, Tally(conversations={}, turns={}))

    def view_of(self, stored: StoredJob, tally: Tally) -> JobView:
        """Return a job with its counts: ended turns, and those ready or in flight on any node."""
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
            JobNotFound: the job does not exist.
        """
        await self._store.read(job_rows.job, job_id)
        return await self._store.read(deliveries.of_job, job_id)

    async def get(self, job_id: JobId) -> JobView:
        """Return a job.

        Raises:
            JobNotFound: the job does not exist.
        """
        return await self._view(await self._store.read(job_rows.job, job_id))

    async def check_seen(self, job_id: JobId, caller: Caller) -> None:
        """Check that a caller may see a job.

        Raises:
            JobNotFound: the job does not exist or belongs to another key; a caller must not learn which.
        """
        if not caller.sees_all and not caller.sees(await self._store.read(job_rows.owner, job_id)):
            raise JobNotFound(job_id)

    async def page(
        self, state: JobState | None, limit: int, before: int | None, caller: Caller = ANYBODY
    ) -> list[JobView]:
        """List the jobs that a caller may see, the newest first."""
        owner = caller.owner
        listed = await self._store.read(job_rows.listed, state, limit, before, owner)
        return [await self._view(stored) for stored in listed]

    async def events_after(self, job_id: JobId, number: int) -> tuple[list[StoredEvent], bool]:
        """Return the next events of a job, and whether none will follow them.

        Raises:
            JobNotFound: the job does not exist, or was deleted.
        """
        return await self._store.read(event_rows.listed, job_id, number, EVENTS_A_READ)

    def progress(self, job_id: JobId) -> Sequence[Progress]:
        """Return the progress of a job's turns in flight."""
        return self._scheduler.turns.progress(job_id)

    def swaps(self, job_id: JobId) -> Sequence[Swap]:
        """Return the newest loads of a job's models on lanes."""
        models = self._scheduler.view.models_of(job_id)
        return [swap for swap in self._scheduler.fleet.lane_pool.swaps if swap.model in models]

    # Reading

    async def transcript(self, job_id: JobId, conversation_id: str) -> dict[str, object]:
        """Return one conversation so far, with the words of turns in flight.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
        """
        return transcript_document(await self._conversation(job_id, conversation_id))

    async def transcript_json(self, job_id: JobId, conversation_id: str, after: int = 0) -> Iterator[bytes]:
        """Return the same as JSON in pieces, without the first ``after`` ended turns.

        Raises:
            JobNotFound: there is no such job.
            ConversationNotFound: it has no such conversation.
        """
        return transcript_pieces(await self._conversation(job_id, conversation_id, after))

    async def _conversation(self, job_id: JobId, conversation_id: str, after: int = 0) -> ConversationRecord:
        # Before the store: a turn that ends in between is in both, and the stored one counts.
        partial = self._scheduler.turns.of_conversation(job_id, conversation_id)
        conversation = await self._store.read(conversation_rows.record, job_id, conversation_id, after)
        ended = {turn.key for turn in conversation.turns if turn.kind is TurnKind.TURN}
        turns = [*conversation.turns, *(turn for turn in partial if turn.key not in ended)]
        return replace(conversation, turns=turns)

    async def document(self, job_id: JobId, which: Literal["all", "none"] | ConversationState) -> bytes:
        """Return a job's posted JSON, with all of its conversations, none, or those in a state.

        Raises:
            JobNotFound: the job does not exist.
        """
        text = await self._store.read(job_rows.document, job_id)
        if which == "all":
            return text.encode()
        states = {} if which == "none" else await self._store.read(conversation_rows.states, job_id)
        wanted = {name for name, state in states.items() if state == which}
        return await anyio.to_thread.run_sync(with_conversations, text, wanted)

    async def ended_conversations(self, job_id: JobId) -> list[str]:
        """Return the ids of a job's ended conversations."""
        states = await self._store.read(conversation_rows.states, job_id)
        return [name for name, state in states.items() if state in ENDED_CONVERSATIONS]

    async def given_up(self, job_id: JobId) -> list[GivenUp]:
        """Return the patterns and schemas of a job that timed out too often."""
        return await self._store.read(job_rows.given_up, job_id)

    async def transcripts(self, job_id: JobId) -> AsyncIterator[Iterator[bytes]]:
        """Iterate over the JSON of all transcripts of an ended job, with one in memory at a time."""
        for conversation_id in await self._store.read(conversation_rows.states, job_id):
            yield await self.transcript_json(job_id, conversation_id)

    async def wait_ended(self, job_id: JobId, limit_s: float) -> None:
        """Return when a job has ended, after ``limit_s``, or when the service stops.

        Raises:
            JobNotFound: the job does not exist, or was deleted meanwhile.
        """
        until = anyio.current_time() + limit_s
        while not self.watch.is_closed:
            change = self.watch.next_change_towards_end(job_id)
            is_over = (await self._store.read(job_rows.job, job_id)).state in ENDED_JOBS
            left_s = until - anyio.current_time()
            if is_over or left_s <= 0:
                return
            with anyio.move_on_after(min(LOOK_S, left_s)):  # another node may run it, without a change here
                await change.wait()

    async def ended(self, job_id: JobId) -> StoredJob:
        """Return an ended job.

        Raises:
            JobNotFound: there is no such job.
            NotFinished: it has not ended.
        """
        stored = await self._store.read(job_rows.job, job_id)
        if stored.state not in ENDED_JOBS:
            raise NotFinished(job_id, stored.state)
        return stored

    # Ending

    async def cancel(self, job_id: JobId) -> StoredJob:
        """Request the cancellation of a job; the request is durable when this returns.

        Raises:
            JobNotFound: the job does not exist.
        """
        stored = await self._store.request_cancel(job_id)
        self._intake.cancel(job_id)
        return stored

    async def delete(self, job_id: JobId, *, with_heirs: bool = False) -> None:
        """Delete all of a job from the store; ``with_heirs`` also the jobs that have inherited from it.

        Such jobs of another key are cancelled, since their inherited turns are gone.

        Raises:
            JobNotFound: the job does not exist.
            NotEnded: the job or one of its heirs has not ended.
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
        return [*gone, *(unloaded(model) for model in sorted(wanted & self._scheduler.fleet.roster.unloaded_models))]
