"""Slots held for the next request of a client's program (specification, "Programs of clients")."""

from collections.abc import Mapping

import pytest

from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import JobId, TurnKey
from service.scheduling.asking.posted import AGENT, CONVERSATION, job_of
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    HoldOver,
    HoldSlot,
    JobAdmitted,
    JobCancelled,
    ProgramReturn,
    StartTurn,
    TurnCompleted,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading

TOKENS = 1000  # length of every prompt
READ_S = 0.01  # a token


class Clients:
    """Programs of clients at a core with one slot; each asks, is answered, and asks again."""

    def __init__(self, *, shares: Mapping[str | None, float] | None = None, has_slot_caches: bool = True) -> None:
        self.core = SchedulingCore(POLICIES["progress"], shares=shares)
        self.ready = WorkerReady(worker="w", model="m", slots=1, read_s=READ_S, has_slot_caches=has_slot_caches)
        self.core.handle(self.ready)
        self.asked = 0
        self.last: dict[str, TurnKey] = {}
        self.flying: dict[TurnKey, str] = {}
        self.names: dict[TurnKey, str] = {}
        self.holds: list[HoldSlot] = []

    def ask(self, name: str, pause_s: float = 1.0) -> None:
        """Let a program ask, this long after its last answer."""
        self.asked += 1
        posted = PostedRequest(path="/", body=b"", name="m", model="m", owner=name)
        job = job_of(posted, JobId(f"r{self.asked}"))
        last = self.last.get(name)
        known = 0 if last is None else TOKENS
        self.names[TurnKey(job.id, CONVERSATION, AGENT, 0)] = name
        self.take(
            self.core.handle(
                JobAdmitted(job=job, program=ProgramReturn(last=last, pause_s=pause_s, known_tokens=known))
            )
        )

    def answer(self, found: int = 0, seconds: float = 1.0) -> None:
        """Answer the request on the slot; the cache held this much of its prompt."""
        (key,) = self.flying
        self.last[self.flying.pop(key)] = key
        reading = PromptReading(fresh_tokens=TOKENS - found, seconds=READ_S * TOKENS, context_tokens=TOKENS)
        self.take(self.core.handle(TurnCompleted(key=key, seconds=seconds, reading=reading)))

    def take(self, actions: list[Action]) -> None:
        self.flying |= {action.key: self.names[action.key] for action in actions if isinstance(action, StartTurn)}
        self.holds += [action for action in actions if isinstance(action, HoldSlot)]
        assert not any(self.core.check())

    def end_hold(self) -> None:
        """Let the newest hold time out."""
        self.take(self.core.handle(HoldOver(key=self.holds[-1].key, seconds=self.holds[-1].seconds)))

    @property
    def on_slot(self) -> list[str]:
        return list(self.flying.values())


def lossy(**of: object) -> Clients:
    """Return clients where a came back to a slot that others had used, and found nothing cached; c waits."""
    clients = Clients(**of)  # type: ignore[arg-type]
    clients.ask("a")
    clients.ask("b")
    clients.answer()
    clients.ask("a")
    clients.answer()
    clients.ask("c")
    assert (clients.on_slot, clients.holds) == (["a"], [])
    return clients


def test_a_slot_is_held_for_its_program_while_others_wait() -> None:
    """Where engines forget prompts, the program's next request goes on at once, ahead of others.

    The hold is bounded.
    """
    clients = lossy()
    clients.answer()
    assert (clients.on_slot, [hold.seconds for hold in clients.holds]) == ([], [4.0])  # four times its pause
    clients.ask("a", pause_s=2.0)
    assert clients.on_slot == ["a"]
    clients.answer(found=TOKENS)
    assert [hold.seconds for hold in clients.holds[1:]] == [8.0]
    clients.end_hold()
    assert clients.on_slot == ["c"]


def test_no_slot_is_held_where_engines_forget_nothing() -> None:
    """A cache beside the slots finds every prompt again, so waiting requests get the slot."""
    clients = Clients()
    for name in ("a", "b"):
        clients.ask(name)
    for name in ("a", "b", "a", "b"):
        clients.answer(found=TOKENS)
        assert clients.on_slot
        clients.ask(name)
    assert clients.holds == []


def test_no_slot_is_held_where_no_cache_for_each_slot_is_known() -> None:
    """One cache serves all slots of vLLM, and an attached server's cache is unknown."""
    clients = lossy(has_slot_caches=False)
    clients.answer()
    assert (clients.on_slot, clients.holds) == (["c"], [])


def test_a_program_that_pauses_for_longer_than_reading_takes_is_not_waited_for() -> None:
    """Nor is one that has never come back: most programs send one request only."""
    clients = lossy()
    clients.answer()
    clients.ask("a", pause_s=TOKENS * READ_S + 1)
    clients.ask("d")
    clients.answer(found=TOKENS)
    assert clients.on_slot == ["c"]
    clients.answer()
    assert (clients.on_slot, len(clients.holds)) == (["d"], 1)


def test_no_program_holds_its_slot_for_ever() -> None:
    """After eight times the reading time others get the slot."""
    clients = lossy()
    clients.answer(seconds=TOKENS * READ_S)
    for _ in range(7):
        clients.ask("a", pause_s=0.0)
        assert clients.on_slot == ["a"]
        clients.answer(found=TOKENS, seconds=TOKENS * READ_S)
    clients.ask("a", pause_s=0.0)
    clients.answer(found=TOKENS, seconds=TOKENS * READ_S)
    assert clients.on_slot == ["c"]


def test_a_slot_that_is_not_held_goes_to_the_next_request() -> None:
    """The hold is decided when an answer ends; if no request waits there is none."""
    clients = lossy()
    clients.answer()
    clients.end_hold()
    clients.answer()
    clients.ask("d")
    assert (clients.on_slot, len(clients.holds)) == (["d"], 1)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_hold_ends_with_its_engine_and_the_wait_with_its_request(is_cancelled: bool) -> None:
    """Neither leaves anything behind: a new engine has no prompt cached, and a late timer finds nothing."""
    clients = lossy()
    clients.answer()
    if is_cancelled:
        clients.take(clients.core.handle(JobCancelled(job_id=JobId("r4"))))
        clients.end_hold()
        assert clients.on_slot == []
        clients.ask("d")
    else:
        clients.take(clients.core.handle(WorkerNotReady(worker="w")))
        clients.take(clients.core.handle(clients.ready))
        assert clients.on_slot == ["c"]
        clients.end_hold()
    assert len(clients.on_slot) == 1


def test_a_key_is_charged_for_a_slot_held_for_it() -> None:
    """Otherwise a program that pauses would use slots for free."""
    clients = lossy(shares={})
    fair = clients.core._ready.fair
    assert fair is not None
    before = fair.times("m").time("a")
    clients.answer()
    clients.ask("a", pause_s=3.0)
    assert fair.times("m").time("a") >= before + 3.0
