"""A conversation that the node already has is skipped when a claim lists it again: a claim never ends the service.

A claim may list it again after an upgrade that was refused late, a late answer, or a database that was restored to an
earlier state.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from service.config.schema import Config
from service.config.workers import worker_specs
from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import JobState, TurnState
from service.node.node import Node, open_node
from service.scheduling.admission import TURNS_AT_ONCE
from service.store import job_rows
from tests.harness.service import Document, scripted_model
from tests.harness.waiting import LIMIT_S, wait_until

Ports = Callable[[int], int]
GUEST: Document = {"id": "guest", "by": "caller"}


class Held:
    """A node with one slot, whose engine holds its request until a gate is open; further requests wait."""

    def __init__(self, node: Node, gate: Path) -> None:
        self.node = node
        self.gate = gate

    async def post(self, *agents: Document, conversations: int = 1, rounds: int = 1) -> JobId:
        talks = [{"id": f"c{number}", "prompt": "Talk."} for number in range(conversations)]
        cast = [{**agent, "system": f"{self.gate}"} if "model" in agent else agent for agent in agents]
        stored, _ = await self.node.door.post({"agents": cast, "conversations": talks, "rounds": rounds}, None)
        return stored.id

    async def claim_again(self, job_id: JobId, *conversations: str) -> None:
        """Have a claim list conversations once more."""
        self.node.store.forget_claims_nowait([(job_id, name) for name in conversations])
        await self.node.store.flush()
        await self.node.intake.claim_jobs(job_id)

    async def check_done(self, job_id: JobId, turns: int) -> None:
        """Open the gate: each turn is recorded once."""
        self.gate.touch()
        await self.node.jobs.wait_ended(job_id, LIMIT_S)
        stored = await self.node.store.read(job_rows.job, job_id)
        assert (stored.state, stored.total_turns) == (JobState.COMPLETED, turns)
        for number in range(stored.total_conversations):
            transcript = await self.node.jobs.transcript(job_id, f"c{number}")
            states = [turn["state"] for turn in transcript["turns"]]  # type: ignore[attr-defined]
            assert states == ["completed"] * (turns // stored.total_conversations)


@asynccontextmanager
async def held(folder: Path, ports: Ports) -> AsyncIterator[Held]:
    gate = folder / "gate"
    model = scripted_model(ports(1), slots=1, hold=r"/[\w/.-]+/gate")
    config = Config.model_validate({"models": {"m": model}})
    async with open_node(config, worker_specs(config, folder, folder / "state"), folder / "state") as node:
        await wait_until(lambda: node.scheduler.free("m") == 1, "its engine is ready")
        yield Held(node, gate)
        await node.shut_down(0.0, anyio.Event())


def agent(name: str, *waits: str) -> Document:
    return {"id": name, "model": "m", **({"speak_after_within_round": list(waits)} if waits else {})}


CASES: dict[str, tuple[tuple[Document, ...], int, int, tuple[str, ...]]] = {
    # agents, conversations, rounds, states claimed again; the first conversation has the slot
    "in flight": ((agent("a"),), 1, 1, ("c0",)),
    "ready": ((agent("a"),), 2, 1, ("c1",)),
    "in flight and ready": ((agent("a"), agent("b")), 1, 1, ("c0",)),
    "in flight and pending": ((agent("a"), agent("b", "a")), 1, 2, ("c0",)),
    "awaited beside one in flight": ((agent("a"), GUEST), 1, 1, ("c0",)),
}


@pytest.mark.parametrize("state", CASES)
async def test_a_running_conversation_is_skipped_when_it_is_claimed_again(
    tmp_path: Path, free_ports: Ports, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """This holds in any state of its turns.

    Counts stay, the log reports it, and each turn is asked and recorded once.
    """
    agents, conversations, rounds, again = CASES[state]
    async with held(tmp_path, free_ports) as subject:
        job_id = await subject.post(*agents, conversations=conversations, rounds=rounds)
        view = subject.node.scheduler.view
        await wait_until(lambda: view.of_all()[TurnState.IN_FLIGHT] == 1, "the first turn has the slot")
        before, counted = dict(view.of_all()), subject.node.scheduler.counters.conversations
        with caplog.at_level(logging.WARNING):
            await subject.claim_again(job_id, *again)
        assert (dict(view.of_all()), subject.node.scheduler.counters.conversations) == (before, counted)
        assert [each for each in caplog.messages if job_id in each and again[0] in each]
        if GUEST in agents:
            await subject.node.callers.say(TurnKey(job_id, "c0", "guest", 0), "Hello.")
            await subject.node.intake.go_on([job_id])
        await subject.check_done(job_id, len(agents) * conversations * rounds)


async def test_a_claim_skips_known_conversations_and_takes_the_rest(tmp_path: Path, free_ports: Ports) -> None:
    """A claim lists one that is here and one whose caller has spoken: the second goes on."""
    async with held(tmp_path, free_ports) as subject:
        job_id = await subject.post(GUEST, agent("a", "guest"), conversations=2)
        view, node = subject.node.scheduler.view, subject.node
        await wait_until(lambda: job_id not in view.jobs(), "both wait for their callers alone")
        await node.store.flush()
        await node.callers.say(TurnKey(job_id, "c0", "guest", 0), "Hello.")
        await node.intake.claim_jobs(job_id)
        await wait_until(lambda: view.of_all()[TurnState.IN_FLIGHT] == 1, "the first has the slot")
        await node.callers.say(TurnKey(job_id, "c1", "guest", 0), "Hello.")
        await subject.claim_again(job_id, "c0")
        assert view.of_all()[TurnState.READY] == 1
        await subject.check_done(job_id, 4)


async def test_a_conversation_that_is_not_admitted_yet_is_skipped(tmp_path: Path, free_ports: Ports) -> None:
    """A large job is admitted in pieces, and its remaining conversations are here as well."""
    many = TURNS_AT_ONCE + 10
    async with held(tmp_path, free_ports) as subject:
        job_id = await subject.post(agent("a"), conversations=many)
        await subject.claim_again(job_id, f"c{many - 1}")
        await subject.node.intake.wait_admitted()
        counts = subject.node.scheduler.view.of_all()
        assert counts[TurnState.READY] + counts[TurnState.IN_FLIGHT] == many
