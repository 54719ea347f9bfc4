"""What a node does about the news of its store: it pauses during an outage, and starts over after a takeover."""

import math
from contextlib import suppress
from typing import assert_never

import anyio

from service.errors import StoreUnavailable
from service.node.followers import JobFollowers
from service.node.intake import Intake
from service.scheduling.outlet import Pause
from service.scheduling.scheduler import Scheduler
from service.store.news import (
    ClaimsLost,
    FactsLost,
    JobsChanged,
    JobsCommitted,
    LeaseEnding,
    LeaseLost,
    LeaseRenewed,
    StoreEvent,
    StoreRecovered,
    StoreTroubled,
    WorkWaiting,
    WritesFailed,
)
from service.store.store import Store

LEASE_ENDING = "the lease of this node to be renewed: another may take over at any moment"
_Later = StoreTroubled | StoreRecovered | ClaimsLost | FactsLost | LeaseLost


class StoreNews:
    """Takes each event at once, or in its order in ``run``: the store tells from no task, and turns start in one."""

    def __init__(self, store: Store, scheduler: Scheduler, intake: Intake, followers: JobFollowers) -> None:
        self._store = store
        self._scheduler = scheduler
        self._intake = intake
        self._followers = followers
        self._send, self._receive = anyio.create_memory_object_stream[_Later](math.inf)

    def __repr__(self) -> str:
        return f"<StoreNews waiting={self._send.statistics().current_buffer_used}>"

    def forward_event(self, event: StoreEvent) -> None:
        """Take an event; nothing here waits."""
        match event:
            case JobsCommitted():
                self._followers.committed(event.job_ids)
                self._intake.hint(is_work=False)  # a turn may have ended, and left its slot to another
            case JobsChanged():
                self._followers.committed(event.job_ids)
            case WorkWaiting():
                self._intake.hint(is_work=True)
            case LeaseEnding():
                self._scheduler.pause(Pause.LEASE, LEASE_ENDING)
                self._scheduler.interrupt_all()
            case LeaseRenewed():
                self._scheduler.unpause(Pause.LEASE)
                self._scheduler.look_elsewhere()
                self._intake.note_neighbours()
            case WritesFailed():
                pass  # ``Store.wait_failed`` ends the node
            case StoreTroubled() | StoreRecovered() | ClaimsLost() | FactsLost() | LeaseLost():
                with suppress(anyio.ClosedResourceError):  # the node has ended, and its store goes on for a moment
                    self._send.send_nowait(event)
            case _:
                assert_never(event)

    async def run(self) -> None:
        """Act on what waits, one event after the other."""
        with self._send, self._receive:
            async for event in self._receive:
                await self._act(event)

    async def _act(self, event: _Later) -> None:
        match event:
            case StoreTroubled():
                self._scheduler.pause(Pause.STORE, f"the store, to be well again: {event.outage}")
            case StoreRecovered():
                self._scheduler.unpause(Pause.STORE)
                self._intake.hint(is_work=True)  # what was claimed as the outage began, and never answered
            case ClaimsLost():
                await self._intake.start_over()
            case FactsLost():
                self._scheduler.end_unwritable(event.conversations)
            case LeaseLost():
                with suppress(StoreUnavailable):  # the writer learns of it, and tells
                    await self._store.flush()
            case _:
                assert_never(event)
