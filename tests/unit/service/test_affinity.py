"""A turn waits for the worker that has its prompt cached, while reading the prompt again would take longer."""

import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId, Mode, TurnKey
from service.scheduling.core.blame import SourceDistrusted
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    DeferralOver,
    DeferTurn,
    JobAdmitted,
    JobCancelled,
    StartTurn,
    TurnCompleted,
    TurnCutOff,
    TurnRejected,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import LEAST_TOKENS, PromptReading
from tests.harness.jobs import agent, job, key

READ_S = 0.01  # a token


def read(tokens: int) -> PromptReading:
    return PromptReading(fresh_tokens=tokens, seconds=READ_S * tokens, context_tokens=tokens)


def seated(actions: list[Action]) -> dict[TurnKey, str]:
    return {action.key: action.worker for action in actions if isinstance(action, StartTurn)}


def holds(actions: list[Action]) -> list[DeferTurn]:
    return [action for action in actions if isinstance(action, DeferTurn)]


def two_conversations(turn_s: float, tokens: int) -> tuple[SchedulingCore, dict[str, TurnKey], list[Action]]:
    """Bring two agents to their second turns.

    One loses its worker, and one worker is free. Both workers have one slot; ``c0`` is warm on ``w``, where another job
    of higher priority now runs.
    """
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(WorkerReady(worker="w", model="m", slots=1))
    assert seated(core.handle(JobAdmitted(job=job(agent("a"), rounds=3)))) == {key("a"): "w"}
    urgent = job(agent("x"), name="urgent", priority=9)
    core.handle(JobAdmitted(job=urgent))
    started = seated(core.handle(TurnCompleted(key=key("a"), seconds=turn_s, reading=read(tokens))))
    (urgent_turn,) = started
    assert started == {urgent_turn: "w"}
    return core, {"urgent": urgent_turn}, core.handle(WorkerReady(worker="v", model="m", slots=1))


def test_a_turn_waits_where_reading_takes_longer() -> None:
    """2,000 tokens at 10 ms are 20 s, and the slot is free in about 5 s."""
    core, turns, actions = two_conversations(turn_s=5.0, tokens=2000)
    assert actions == [DeferTurn(key=key("a", 1), worker="w", seconds=pytest.approx(20.0))]  # type: ignore[arg-type]
    assert core.view.queues.deferred_for(key("a", 1)) == "w"
    assert [each for each, _ in core.view.queues.ready_heads(5)] == [key("a", 1)]
    assert seated(core.handle(TurnCompleted(key=turns["urgent"], seconds=5.0))) == {key("a", 1): "w"}
    assert core.view.queues.deferred_for(key("a", 1)) is None
    assert core.handle(DeferralOver(key=key("a", 1))) == []


def test_a_deferred_turn_whose_job_becomes_distrusted_gets_a_trial() -> None:
    """It loses its reserved place and waits for an idle worker, as every turn of a distrusted job does."""
    core, turns, _ = two_conversations(turn_s=5.0, tokens=2000)
    core.handle(SourceDistrusted(source=key("a").job_id))
    actions = core.handle(TurnCompleted(key=turns["urgent"], seconds=5.0))
    (start,) = (action for action in actions if isinstance(action, StartTurn))
    assert (start.key, start.is_suspect) == (key("a", 1), True)
    assert core.view.queues.deferred_for(key("a", 1)) is None
    assert [fault for fault in core.check() if fault is not None] == []


@pytest.mark.parametrize(("turn_s", "tokens"), [(25.0, 2000), (1.0, LEAST_TOKENS - 1)])
def test_a_warm_slot_is_left_when_the_wait_costs_more(turn_s: float, tokens: int) -> None:
    """A long turn occupies the slot, or too few prompts were read to know the reading time."""
    _, _, actions = two_conversations(turn_s=turn_s, tokens=tokens)
    assert seated(actions) == {key("a", 1): "v"}


def test_no_turn_waits_longer_than_reading_takes() -> None:
    """The turn on the slot may never end."""
    core, _, _ = two_conversations(turn_s=5.0, tokens=2000)
    assert seated(core.handle(DeferralOver(key=key("a", 1)))) == {key("a", 1): "v"}


def test_a_turn_waits_for_no_lost_worker() -> None:
    """The cache ends with the process."""
    core, _, _ = two_conversations(turn_s=5.0, tokens=2000)
    assert seated(core.handle(WorkerNotReady(worker="w"))) == {key("a", 1): "v"}


def test_a_free_slot_goes_to_a_turn_that_can_use_it() -> None:
    """A turn that waits for its worker keeps no other slot idle."""
    core, _, _ = two_conversations(turn_s=5.0, tokens=2000)
    assert core.view.free("m") == 1
    actions = core.handle(JobAdmitted(job=job(agent("a"), name="other")))
    assert list(seated(actions).values()) == ["v"]
    assert holds(actions) == []


def test_a_held_turn_is_cancelled_with_its_job() -> None:
    """A cancelled turn leaves the ready queue and waits nowhere."""
    core, _, _ = two_conversations(turn_s=5.0, tokens=2000)
    core.handle(JobCancelled(job_id=JobId("j")))
    assert core.view.queues.deferred_for(key("a", 1)) is None
    assert core.handle(DeferralOver(key=key("a", 1))) == []
    assert core.view.queues.ready_heads(5) == []


def test_a_second_turn_waits_behind_the_first() -> None:
    """Three slots with turns of 15 s: one is free in 5 s, the next in 10 s, and reading takes no longer."""
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(WorkerReady(worker="w", model="m", slots=3))
    core.handle(JobAdmitted(job=job(agent("a"), conversations=3, rounds=3)))
    urgent = [job(agent("x"), name=f"urgent-{number}", priority=9) for number in range(3)]
    for each in urgent:
        core.handle(JobAdmitted(job=each))
    for number in range(3):
        core.handle(TurnCompleted(key=key("a", 0, number), seconds=15.0, reading=read(1000)))
    actions = core.handle(WorkerReady(worker="v", model="m", slots=3))
    assert [hold.key for hold in holds(actions)] == [key("a", 1, 0)]
    assert seated(actions) == {key("a", 1, 1): "v", key("a", 1, 2): "v"}


def test_a_turn_that_was_cut_off_elsewhere_frees_the_slot() -> None:
    """A deferred turn goes first, however its slot became free."""
    core, turns, _ = two_conversations(turn_s=5.0, tokens=2000)
    core.handle(JobCancelled(job_id=turns["urgent"].job_id))
    assert seated(core.handle(TurnCutOff(key=turns["urgent"]))) == {key("a", 1): "w"}


def test_a_re_prompt_goes_ahead_of_deferred_turns() -> None:
    """A re-prompt goes ahead of all waiting work, on the slot that it had if necessary.

    Source: specification, "Re-prompts".
    """
    core, turns, actions = two_conversations(turn_s=5.0, tokens=2000)
    core.handle(JobAdmitted(job=job(agent("y"), name="other")))  # on the free worker
    assert holds(actions)
    again = seated(core.handle(TurnRejected(key=turns["urgent"])))
    assert again == {turns["urgent"]: "w"}
    assert seated(core.handle(TurnCompleted(key=turns["urgent"], seconds=5.0))) == {key("a", 1): "w"}


def test_a_re_prompt_goes_ahead_of_a_turn_deferred_in_vain() -> None:
    """A deferred turn returns to its old place in the order, which is behind re-prompts."""
    core, turns, _ = two_conversations(turn_s=5.0, tokens=2000)
    (other,) = seated(core.handle(JobAdmitted(job=job(agent("y"), name="other"))))
    core.handle(DeferralOver(key=key("a", 1)))
    assert [each for each, _ in core.view.queues.ready_heads(5)] == [key("a", 1)]
    again = seated(core.handle(TurnRejected(key=other), TurnCutOff(key=turns["urgent"])))
    assert list(again) == [other, key("a", 1)]


def test_in_free_mode_no_turn_is_deferred_and_overtaken() -> None:
    """The free slot goes to the agent at the front: the order of speakers decides what the others hear.

    Source: specification, "Free mode".
    """
    core = SchedulingCore(POLICIES["progress"])
    for worker in ("w", "v"):
        core.handle(WorkerReady(worker=worker, model="m", slots=1))
    made = replace(job(*(agent(name) for name in "abcd"), rounds=3), mode=Mode.FREE)
    spoken = list(seated(core.handle(JobAdmitted(job=made))))
    running = list(spoken)
    while running:
        actions = core.handle(TurnCompleted(key=running.pop(), seconds=5.0, reading=read(2000)))
        assert holds(actions) == []
        spoken += seated(actions)
        running += seated(actions)
    assert [turn.agent_id for turn in spoken[:4]] == ["a", "b", "c", "d"]
    assert len(spoken) == 12
