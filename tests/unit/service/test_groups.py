from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import GroupBy, Mode, TurnKey
from service.scheduling.core.blame import SourceDistrusted
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    JobAdmitted,
    JobCancelled,
    Paused,
    StartTurn,
    TurnCompleted,
    TurnRejected,
    Unpaused,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.groups import STREAK
from tests.harness.jobs import agent, job


def core(slots: int = 2, workers: int = 1, policy: str = "fifo", by: GroupBy = GroupBy.PARAMETERS) -> SchedulingCore:
    made = SchedulingCore(POLICIES[policy], by)
    for number in range(workers):
        made.handle(WorkerReady(worker=f"w{number}", model="m", slots=slots))
    return made


def starts(actions: list[Action]) -> list[tuple[str, TurnKey]]:
    return [(action.worker, action.key) for action in actions if isinstance(action, StartTurn)]


def test_a_worker_runs_one_signature_at_a_time() -> None:
    """Specification, "Grouping": the other signature waits until the worker is empty, though a slot is free."""
    scheduler = core()
    cold = job(agent("cold", params={"temperature": 0}), conversations=3, name="cold")
    hot = job(agent("hot", params={"temperature": 1}), conversations=2, name="hot")
    first = starts(scheduler.handle(JobAdmitted(job=cold), JobAdmitted(job=hot)))
    assert [key.agent_id for _, key in first] == ["cold", "cold"]
    (third,) = starts(scheduler.handle(TurnCompleted(key=first[0][1])))
    assert third[1].agent_id == "cold"
    assert starts(scheduler.handle(TurnCompleted(key=first[1][1]))) == []
    last = starts(scheduler.handle(TurnCompleted(key=third[1])))
    assert [key.agent_id for _, key in last] == ["hot", "hot"]


def test_two_workers_may_run_different_signatures() -> None:
    """A signature belongs to a worker, not to a model."""
    scheduler = core(slots=1, workers=2)
    cold = job(agent("cold", params={"temperature": 0}), name="cold")
    hot = job(agent("hot", params={"temperature": 1}), name="hot")
    told = starts(scheduler.handle(JobAdmitted(job=cold))) + starts(scheduler.handle(JobAdmitted(job=hot)))
    assert [(worker, key.agent_id) for worker, key in told] == [("w0", "cold"), ("w1", "hot")]


def test_a_re_prompt_goes_ahead_of_every_group() -> None:
    """Specification, "Re-prompts": others wait for it, whatever signature its worker runs."""
    scheduler = core(slots=1)
    cold = job(agent("cold", params={"temperature": 0}), conversations=3, name="cold")
    hot = job(agent("hot", params={"temperature": 1}), name="hot")
    ((_, first),) = starts(scheduler.handle(JobAdmitted(job=hot), JobAdmitted(job=cold)))
    assert first.agent_id == "hot"
    assert starts(scheduler.handle(TurnRejected(key=first))) == [("w0", first)]
    ((_, second),) = starts(scheduler.handle(TurnCompleted(key=first)))
    scheduler.handle(WorkerReady(worker="w1", model="m", slots=1))
    late = job(agent("hot", params={"temperature": 1}), name="late")
    scheduler.handle(JobAdmitted(job=late))
    assert [key.job_id for key, _ in scheduler.view.queues.ready_heads(9)][-1] == "late"
    again = starts(scheduler.handle(TurnRejected(key=second)))
    assert again[0][1] == second
    assert second.agent_id == "cold"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_waiting_turn_is_not_starved_by_a_stream_of_others(policy: str) -> None:
    """Ageing: after a number of starts a worker runs empty, and takes the signature that has waited longest."""
    slots = 2
    scheduler = core(slots=slots, policy=policy)
    cold = job(agent("cold", params={"temperature": 0}), conversations=200, name="cold")
    hot = job(agent("hot", params={"temperature": 1}), name="hot")
    running = deque(starts(scheduler.handle(JobAdmitted(job=cold))))
    running.extend(starts(scheduler.handle(JobAdmitted(job=hot))))
    started = 0
    while not any(key.agent_id == "hot" for _, key in running):
        _, key = running.popleft()
        fresh = starts(scheduler.handle(TurnCompleted(key=key)))
        started += sum(each.agent_id == "cold" for _, each in fresh)
        running.extend(fresh)
    assert started <= STREAK * slots + slots


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(sorted(POLICIES)),
    st.randoms(use_true_random=False),
)
def test_every_turn_runs_and_signatures_never_mix(
    jobs: list[tuple[int, int]], slots: int, workers: int, policy: str, random: "object"
) -> None:
    """Each turn runs once, and no worker ever has two signatures in flight."""
    scheduler = core(slots=slots, workers=workers, policy=policy)
    heat = {f"j{number}": kind for number, (kind, _) in enumerate(jobs)}
    left = sum(count for _, count in jobs)
    running: list[tuple[str, TurnKey]] = []
    waiting = [
        job(agent("a", params={"temperature": kind}), conversations=count, name=f"j{number}")
        for number, (kind, count) in enumerate(jobs)
    ]
    while waiting or running:
        if waiting and (not running or random.random() < 0.5):  # type: ignore[attr-defined]
            running += starts(scheduler.handle(JobAdmitted(job=waiting.pop())))
        else:
            place = random.randrange(len(running))  # type: ignore[attr-defined]
            running += starts(scheduler.handle(TurnCompleted(key=running.pop(place)[1])))
            left -= 1
        for worker in {worker for worker, _ in running}:
            assert len({heat[key.job_id] for at, key in running if at == worker}) == 1
    assert left == 0


def test_a_cancelled_job_leaves_no_group_behind() -> None:
    """Its turns leave their group, and the next signature goes on."""
    scheduler = core(slots=1)
    cold = job(agent("cold", params={"temperature": 0}), conversations=5, name="cold")
    hot = job(agent("hot", params={"temperature": 1}), name="hot")
    ((_, first),) = starts(scheduler.handle(JobAdmitted(job=cold)))
    scheduler.handle(JobAdmitted(job=hot))
    scheduler.handle(JobCancelled(job_id=cold.id))
    ((_, then),) = starts(scheduler.handle(TurnCompleted(key=first)))
    assert then.agent_id == "hot"


def test_a_group_may_depend_on_adapters_alone() -> None:
    """llama.cpp decodes one set of adapters at a time, whatever the other parameters are."""
    plain, warm = agent("a"), agent("a", params={"temperature": 1})
    assert plain.signature(GroupBy.ADAPTER) == warm.signature(GroupBy.ADAPTER)
    assert plain.signature(GroupBy.PARAMETERS) != warm.signature(GroupBy.PARAMETERS)


@pytest.mark.parametrize("policy", POLICIES)
def test_free_mode_keeps_its_queue_within_a_signature(policy: str) -> None:
    """Specification, "Free mode": first in, first out, whatever the policy prefers."""
    scheduler = core(slots=1, policy=policy)
    made = replace(job(*(agent(name) for name in "abc"), rounds=4), mode=Mode.FREE)
    running, order = starts(scheduler.handle(JobAdmitted(job=made))), ""
    while running:
        _, key = running.pop()
        order += key.agent_id
        running += starts(scheduler.handle(TurnCompleted(key=key)))
    assert order == "abc" * 4


def test_a_look_changes_nothing() -> None:
    """The next signature is the one that has waited longest, however often the queue is read."""
    looked, unseen = core(slots=1), core(slots=1)
    jobs = [job(agent("a", params={"temperature": n % 3}), name=f"j{n}", conversations=9) for n in range(6)]
    orders = []
    for scheduler in (looked, unseen):
        running, order = starts(scheduler.handle(*(JobAdmitted(job=each) for each in jobs))), []
        while running:
            _, key = running.pop()
            order.append(key)
            running += starts(scheduler.handle(TurnCompleted(key=key)))
            if scheduler is looked:
                scheduler.view.queues.ready_heads(7)
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 54


def test_a_distrusted_job_leaves_its_slots_to_others() -> None:
    """Its turns wait for their trials while others' turns start; otherwise nothing would ever start."""
    scheduler = core()
    bad, good = job(agent("a"), conversations=10, name="bad"), job(agent("a"), conversations=10, name="good")
    started = starts(
        scheduler.handle(JobAdmitted(job=bad), SourceDistrusted(source=bad.id), JobAdmitted(job=good), Paused())
    )
    assert started == []
    assert [key.job_id for _, key in starts(scheduler.handle(Unpaused()))] == ["good", "good"]
