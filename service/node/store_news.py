"""A node's reactions to news of its store: it pauses in an outage, and starts over after a takeover."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import assert_never

import anyio
from typing_extensions import override

from service.conversations.job.job import JobId, TurnKey
from service.errors import StoreUnavailable
from service.node.followers import JobFollowers
from service.node.intake import Intake
from service.scheduling.core.events import ConversationReleased
from service.scheduling.scheduler import Scheduler
from service.scheduling.work import Pause, SchedulerStore
from service.store import news, tool_rows
from service.store.records import Record, StoredToolCall
from service.store.store import Store
from workers.outcome import CancelReason

LEASE_ENDING = "the lease of this node to be renewed: another may take over at any moment"


class StoreOutlet(SchedulerStore):
    """The outlet for a scheduler's facts and conversations (``service.scheduling.work.SchedulerStore``).

    ``listen`` gets the facts when they are submitted, or when they are stored if the caller waits for that. It must
    neither wait nor fail.
    """

    def __init__(
        self,
        store: Store,
        models: Sequence[str],
        lease_s: float,
        followers: JobFollowers,
        neighbours: news.Neighbours,
        listen: Callable[[Sequence[Record]], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._followers = followers
        self._neighbours = neighbours
        self._models = models
        self._lease_s = lease_s
        self._listen = listen
        self._missed_at: dict[str, float] = {}  # by model: when no other node had it at first

    def __repr__(self) -> str:
        return f"<StoreOutlet to {self._store!r}>"

    @override
    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        self._store.append_nowait(records, on_durable)
        self._listen(records)

    @override
    async def append(self, records: Sequence[Record]) -> bool:
        is_stored = await self._store.append(records)
        if is_stored:
            self._listen(records)
        return is_stored

    @override
    async def calls_of(self, key: TurnKey) -> Sequence[StoredToolCall]:
        return await self._store.read(tool_rows.of_turn, key)

    @override
    def release_nowait(self, released: Sequence[ConversationReleased]) -> None:
        left = {(each.job_id, each.conversation_id): each for each in released}
        self._store.release_nowait(
            {place: each.models for place, each in left.items()},
            {place: each.awaited for place, each in left.items() if each.awaited},
        )

    def is_followed(self, job_id: JobId) -> bool:
        """Whether a client follows a job while it runs."""
        return self._followers.is_followed(job_id)

    def is_elsewhere(self, model: str) -> bool:
        """Whether a model is for other nodes: one has it, or this node never will."""
        if isinstance(self._neighbours, news.Alone):
            return False
        if model not in self._models:
            return True
        if model in self._neighbours.models():
            self._missed_at.pop(model, None)
            return True
        # A node that is starting is known a little later: only after a whole lease is it certain that none has the
        # model.
        return time.monotonic() - self._missed_at.setdefault(model, time.monotonic()) < self._lease_s


_Later = news.StoreTroubled | news.StoreRecovered | news.ClaimsLost | news.FactsLost | news.LeaseLost


class StoreNews:
    """Handles events at once, or in order in ``run``: the store reports outside tasks, and turns start in one."""

    def __init__(self, store: Store, scheduler: Scheduler, intake: Intake, followers: JobFollowers) -> None:
        self._store = store
        self._scheduler = scheduler
        self._intake = intake
        self._followers = followers
        self._send, self._receive = anyio.create_memory_object_stream[_Later](math.inf)

    def __repr__(self) -> str:
        return f"<StoreNews waiting={self._send.statistics().current_buffer_used}>"

    def forward_event(self, event: news.StoreEvent) -> None:
        """Handle an event; nothing here waits."""
        match event:
            case news.JobsCommitted():
                self._followers.committed(event.job_ids)
                self._intake.hint(is_work=False)  # a turn may have ended and freed its slot
            case news.JobsChanged():
                self._followers.committed(event.job_ids)
            case news.WorkWaiting():
                self._intake.hint(is_work=True)
            case news.LeaseEnding():
                self._scheduler.pauses.pause(Pause.LEASE, LEASE_ENDING)
                self._scheduler.works.interrupt_all(CancelReason.LEASE_LOST)
            case news.LeaseRenewed():
                self._scheduler.pauses.unpause(Pause.LEASE)
                self._scheduler.look_elsewhere()
                self._intake.note_neighbours()
            case news.WritesFailed():
                pass  # ``Store.wait_failed`` ends the node
            case news.StoreTroubled() | news.StoreRecovered() | news.ClaimsLost() | news.FactsLost() | news.LeaseLost():
                with suppress(anyio.ClosedResourceError):  # the node has ended before its store
                    self._send.send_nowait(event)
            case _:
                assert_never(event)

    async def run(self) -> None:
        """Handle queued events, one after the other."""
        with self._send, self._receive:
            async for event in self._receive:
                await self._act(event)

    async def _act(self, event: _Later) -> None:
        match event:
            case news.StoreTroubled():
                self._scheduler.pauses.pause(Pause.STORE, f"the store, to be well again: {event.outage}")
            case news.StoreRecovered():
                self._scheduler.pauses.unpause(Pause.STORE)
                self._intake.hint(is_work=True)  # claims that the outage left unanswered
            case news.ClaimsLost():
                await self._intake.start_over()
            case news.FactsLost():
                self._scheduler.end_unwritable(event.conversations)
            case news.LeaseLost():
                with suppress(StoreUnavailable):  # the writer detects it, and reports it
                    await self._store.flush()
            case _:
                assert_never(event)
