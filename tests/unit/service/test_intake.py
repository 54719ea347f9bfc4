"""Which jobs a node among several claims, and when: jobs that no node serves only after a look at the others."""

from collections.abc import Mapping, Sequence
from typing import cast

import anyio
import pytest

from service.conversations.job.job import JobId
from service.node.intake import HOPELESS, Intake
from service.scheduling.scheduler import Scheduler
from service.store.databases.database import Claim
from service.store.store import Store
from tests.harness.jobs import agent, job
from tests.harness.waiting import LIMIT_S


class Parts:
    """A scheduler without slots and its view, and a store with nothing to claim; both record the calls they get."""

    def __init__(self, *hopeless: str) -> None:
        self.hopeless = hopeless
        self.claims: list[tuple[str, int | None]] = []
        self.is_closing = False
        self.detail = None  # nothing is paused
        self.view = self.pauses = self.fleet = self.lanes = self

    def is_hopeless(self, model: str) -> bool:
        return model in self.hopeless

    def slots(self, model: str) -> int:
        return 0 if model in self.hopeless else 2

    def free(self, _model: str) -> int:
        return 2

    def slots_on_demand(self, _model: str) -> int:
        return 0

    def models(self) -> frozenset[str]:
        return frozenset()

    async def read(self, _query: object) -> Sequence[JobId]:
        return ()

    def jobs(self) -> tuple[JobId, ...]:
        return ()

    async def claim(self, models: Sequence[str], limit: int | None, _job_id: JobId | None = None) -> Sequence[Claim]:
        self.claims.append((models[0], limit))
        return ()


def intake(parts: Parts) -> Intake:
    adapters: Mapping[str, str] = {}
    return Intake(cast("Store", parts), cast("Scheduler", parts), ("m", "gone"), lambda: adapters, is_shared=True)


async def test_a_job_that_no_node_serves_is_claimed_after_a_look_at_the_others() -> None:
    """A node that has just joined might serve it. Each look counts for the jobs that were there."""
    parts = Parts("gone")
    node = intake(parts)
    assert node.has_room_for(job(agent("a")))
    assert not node.has_room_for(job(agent("a", model="gone")))
    await node.claim_jobs()
    assert parts.claims == [("m", 4)]
    node.note_neighbours()
    for _ in range(2):
        await node.claim_jobs()
    assert parts.claims[1:] == [("m", 4), ("gone", HOPELESS), ("m", 4)]


async def test_a_look_at_the_others_wakes_a_node_that_has_a_job_to_end() -> None:
    """It does not wait for the next poll."""
    parts = Parts("gone")
    node = intake(parts)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.run)
            await anyio.wait_all_tasks_blocked()
            parts.claims.clear()
            node.note_neighbours()
            await anyio.wait_all_tasks_blocked()
            assert ("gone", HOPELESS) in parts.claims
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("hopeless", [(), ("elsewhere",)])
async def test_a_look_ends_nothing_where_all_models_are_served(hopeless: Sequence[str]) -> None:
    """A job that becomes hopeless later waits for a look of its own."""
    parts = Parts(*hopeless)
    node = intake(parts)
    node.note_neighbours()
    parts.hopeless = ("gone",)
    await node.claim_jobs()
    assert parts.claims == [("m", 4)]
