"""Virtual times of keys, and the order of turns among them and within one."""

import pytest
from msgspec.structs import replace

from service.conversations.job.job import Job, TurnKey
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading, SpeedEstimates
from service.scheduling.core.queue.fair_shares import UNKNOWN, FairShares, VirtualTimes
from tests.harness.jobs import agent, job, key


def owned(owner: str | None, *, name: str = "", conversations: int = 9, priority: int = 0) -> Job:
    made = job(agent("a"), name=name or str(owner), conversations=conversations, priority=priority)
    return replace(made, owner=owner)


def starts(actions: list[events.Action]) -> list[TurnKey]:
    return [action.key for action in actions if isinstance(action, events.StartTurn)]


def test_a_charge_is_corrected_by_what_the_turn_used() -> None:
    """By the key's share; figures that are not reported stay as charged."""
    times = VirtualTimes({"alice": 2.0})
    times.arrive("alice")
    assert times.start("alice") == UNKNOWN
    assert times.time("alice") == UNKNOWN / 2
    times.settle("alice", UNKNOWN, 300.0)
    assert times.time("alice") == 150.0
    assert times.start("alice") == 300.0  # as its turns so far
    assert times.time("alice") == 300.0
    times.arrive("bob")
    assert times.time("bob") == 150.0  # where alice began her last turn
    assert times.start("bob") == 300.0  # like any turn so far
    fair = FairShares({})
    fair.times("m").arrive("alice")
    fair.start(key("a"), "m", "alice")
    fair.end_turn(key("a"))
    assert (fair.model_of(key("a")), fair.times("m").time("alice")) == (None, UNKNOWN)


def test_a_key_that_enters_a_second_queue_has_not_come_back() -> None:
    """Only a key that waited in no queue starts where the others are."""
    times = VirtualTimes({})
    times.arrive("alice")
    times.arrive("bob")
    for _ in range(5):
        times.start("bob")
    times.arrive("alice")
    assert times.time("alice") == 0.0
    times.leave_queue("alice")
    times.leave_queue("alice")
    times.leave_queue("bob")
    times.start("bob")  # no other key waits
    times.arrive("alice")
    assert times.time("alice") == 5.0


def test_tokens_of_a_prompt_are_weighed_by_the_cost_of_reading() -> None:
    """They weigh as much as those of an answer until both speeds of the model are known."""
    speeds = SpeedEstimates()
    assert speeds.weigh("m", 1000, 50) == 1050
    reading = PromptReading(fresh_tokens=1000, seconds=1.0, context_tokens=1100, answer_tokens=101, answer_s=2.0)
    speeds.learn("m", 3.0, reading)
    assert speeds.weigh("m", 1000, 50) == pytest.approx(50 + 1000 * (0.001 / 0.02))
    assert speeds.weigh("n", 1000, 50) == 1050


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_order_is_by_key_then_front_then_priority(policy: str) -> None:
    """A re-prompt waits for another key's turn, and goes before higher priorities of its own key."""
    core = SchedulingCore(POLICIES[policy], shares={})
    core.handle(events.WorkerReady(worker="w", model="m", slots=1))
    (first,) = starts(core.handle(events.JobAdmitted(job=owned("alice"))))
    core.handle(events.JobAdmitted(job=owned("alice", name="urgent", priority=1)))
    core.handle(events.JobAdmitted(job=owned("bob")))
    spent = events.TurnSpent(key=first, fresh_tokens=0, answer_tokens=100)
    (second,) = starts(core.handle(spent, events.TurnRejected(key=first)))
    assert second.job_id == "bob"
    spent = events.TurnSpent(key=second, fresh_tokens=0, answer_tokens=150)
    (third,) = starts(core.handle(spent, events.TurnCompleted(key=second)))
    assert third == first
    spent = events.TurnSpent(key=third, fresh_tokens=0, answer_tokens=10)
    (fourth,) = starts(core.handle(spent, events.TurnCompleted(key=third)))
    assert fourth.job_id == "urgent"
    heads = [turn.job_id for turn, _ in core.view.queues.ready_heads(2)]
    assert heads == ["bob", "urgent"]
