"""How a node handles its store's news: urgent events at once, and the others in order."""

from typing import cast

import anyio
import pytest

from service.conversations.job.job import JobId
from service.errors import StoreError
from service.node.followers import JobFollowers
from service.node.intake import Intake
from service.node.store_news import StoreNews
from service.scheduling.scheduler import Scheduler
from service.store.news import (
    ClaimsLost,
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
from workers.outcome import CancelReason

JOBS = frozenset({JobId("j")})


class Recorder:
    """Stands for all parts of a node, and records the calls to each."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.pauses = self.works = self

    def pause(self, why: str, _words: str) -> None:
        self.told.append(f"pause {why}")

    def unpause(self, why: str) -> None:
        self.told.append(f"unpause {why}")

    def hint(self, *, is_work: bool) -> None:
        self.told.append(f"hint {is_work}")

    def committed(self, job_ids: frozenset[JobId]) -> None:
        self.told.append(f"wake {', '.join(job_ids)}")

    def interrupt_all(self, why: CancelReason) -> None:
        assert why is CancelReason.LEASE_LOST
        self.told.append("interrupt")

    def look_elsewhere(self) -> None:
        self.told.append("look elsewhere")

    def note_neighbours(self) -> None:
        self.told.append("note neighbours")

    async def start_over(self) -> None:
        self.told.append("start over")

    async def flush(self) -> None:
        self.told.append("flush")


@pytest.mark.parametrize(
    ("event", "at_once", "later"),
    [
        (JobsCommitted(job_ids=JOBS), ["wake j", "hint False"], []),
        (JobsChanged(job_ids=JOBS), ["wake j"], []),
        (WorkWaiting(), ["hint True"], []),
        (LeaseEnding(), ["pause lease", "interrupt"], []),
        (LeaseRenewed(), ["unpause lease", "look elsewhere", "note neighbours"], []),
        (WritesFailed(error=StoreError("lost")), [], []),
        (StoreTroubled(outage="the disk is full"), [], ["pause store"]),
        (StoreRecovered(), [], ["unpause store", "hint True"]),
        (ClaimsLost(), [], ["start over"]),
        (LeaseLost(), [], ["flush"]),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_each_event_has_its_consequence(event: StoreEvent, at_once: list[str], later: list[str]) -> None:
    """A lease that ends cannot wait behind a takeover; what starts turns runs in a task."""
    recorder = Recorder()
    news = StoreNews(
        cast("Store", recorder), cast("Scheduler", recorder), cast("Intake", recorder), cast("JobFollowers", recorder)
    )
    async with anyio.create_task_group() as tasks:
        news.forward_event(event)
        assert recorder.told == at_once
        tasks.start_soon(news.run)
        await anyio.wait_all_tasks_blocked()
        assert recorder.told == at_once + later
        tasks.cancel_scope.cancel()
    news.forward_event(event)  # the store outlives the node by a moment
