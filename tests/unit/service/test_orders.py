"""Orders of ready turns, on engines with a virtual clock: what each promises, and what all must keep."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, Job, JobId, Mode, OnFailure, TurnKey
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    AbandonTurn,
    ConversationEnded,
    JobAdmitted,
    JobEnded,
    ModelLost,
    ModelRegained,
    StartTurn,
    TurnCompleted,
    TurnIsReady,
    TurnRejected,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.policies.critical_path import AGEING_TURNS
from service.scheduling.core.queue.ready_queue import JobLoad, ReadyTurn
from tests.harness.simulation import drawn, job_of, mixes, simulate

TIMELINE = {("A1", 0): 4, ("A2", 0): 8, ("A3", 0): 4, ("A1", 1): 3, ("A2", 1): 6, ("A3", 1): 2}


def free(*names: str, rounds: int, conversations: int = 1, models: Sequence[str] = ()) -> Job:
    return Job(
        id=JobId("j"),
        name="j",
        agents=tuple(
            Agent(id=name, role="", model=models[n] if models else "m", system="") for n, name in enumerate(names)
        ),
        conversations=tuple(Conversation(id=f"c{n}", prompt="", rounds=rounds) for n in range(conversations)),
        mode=Mode.FREE,
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_timeline_of_free_mode(policy: str) -> None:
    """Two slots and three agents: the starts under every policy; the queue belongs to the conversation."""
    told = simulate([free("A1", "A2", "A3", rounds=3)], 2, policy, lambda key: TIMELINE.get((key[2], key[3]), 100.0))
    starts = [(at, key.agent_id, key.round) for at, key in told.starts]
    assert starts[:8] == [
        (0, "A1", 0),
        (0, "A2", 0),
        (4, "A3", 0),
        (8, "A1", 1),
        (8, "A2", 1),
        (11, "A3", 1),
        (13, "A1", 2),
        (14, "A3", 2),
    ]


def test_free_mode_keeps_one_queue_for_each_model() -> None:
    """A free slot of another model gives no place in this model's queue."""
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(JobAdmitted(job=free("a", "x", "b", rounds=2, models=("m", "n", "m"))))
    starts = [action.key.agent_id for action in core.handle(WorkerReady(worker="n0", model="n", slots=1))
              if isinstance(action, StartTurn)]  # fmt: skip
    assert starts == ["x"]
    assert [
        a.key[2] for a in core.handle(WorkerReady(worker="m0", model="m", slots=1)) if isinstance(a, StartTurn)
    ] == ["a"]


@settings(max_examples=60)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["moderator", "chain", "free"]),
            st.lists(st.integers(1, 6), min_size=1, max_size=4),
            st.integers(-1, 1),
        ),
        min_size=1,
        max_size=6,
    ),
    slots=st.integers(1, 9),
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 10_000),
)
def test_no_schedule_is_longer_than_list_scheduling_allows(
    kinds: list[tuple[str, list[int], int]], slots: int, policy: str, seed: int
) -> None:
    """Graham 1966: in any order the makespan is at most (2 - 1/m) times the bound; and every turn runs once."""
    jobs = [job_of(f"j{n}", kind, rounds, priority=priority) for n, (kind, rounds, priority) in enumerate(kinds)]
    schedule = simulate(jobs, slots, policy, drawn(seed))
    assert schedule.ratio <= 2 - 1 / slots + 1e-9
    keys = [key for _, key in schedule.starts]
    assert len(keys) == len(set(keys)) == sum(job.total_turns for job in jobs)


def test_the_longest_path_goes_first_within_a_job() -> None:
    """One long conversation among short ones must not come last, as it would with a semaphore."""
    jobs = mixes()["skewed, 1 job"]
    ratios = {policy: simulate(jobs, 8, policy, drawn(1)).ratio for policy in POLICIES}
    assert ratios["critical_path"] * 1.15 < min(ratios["fifo"], ratios["progress"])


def test_short_jobs_end_soon_and_the_whole_ends_hardly_later() -> None:
    """24 mixed jobs on 8 slots: on average jobs end much sooner than first come, first served."""
    jobs = mixes()["mixed, 24 jobs"]
    told = [
        (simulate(jobs, 8, "critical_path", drawn(seed)), simulate(jobs, 8, "fifo", drawn(seed))) for seed in range(4)
    ]
    assert sum(ours.mean_completion for ours, _ in told) < 0.7 * sum(fifo.mean_completion for _, fifo in told)
    assert all(ours.ratio < 1.2 for ours, _ in told)


def test_no_turn_starves() -> None:
    """A turn that loses every comparison starts within its bound, though better ones keep coming."""
    core = SchedulingCore(POLICIES["critical_path"])
    core.handle(WorkerReady(worker="w", model="m", slots=1))
    core.handle(JobAdmitted(job=job_of("first", "free", [500])))
    core.handle(JobAdmitted(job=job_of("poor", "free", [1], priority=-1)))
    started: list[TurnKey] = []
    flying = TurnKey(JobId("first"), "c0", "a0", 0)
    for number in range(10 * AGEING_TURNS):
        core.handle(JobAdmitted(job=job_of(f"rich{number}", "free", [500], priority=1)))
        (start,) = [a for a in core.handle(TurnCompleted(key=flying, seconds=1.0)) if isinstance(a, StartTurn)]
        flying = start.key
        started.append(flying)
    poor = [place for place, key in enumerate(started) if key.job_id == "poor"]
    older = 2  # turns of the first job that were ready before
    assert poor[0] <= AGEING_TURNS * (older + 1)
    assert max(second - first for first, second in pairwise(poor)) <= AGEING_TURNS


def test_a_rejected_answer_is_asked_for_again_ahead_of_everything() -> None:
    """Specification, "Re-prompts": whatever the policy and the priorities."""
    for policy in POLICIES.values():
        core = SchedulingCore(policy)
        core.handle(WorkerReady(worker="w", model="m", slots=1))
        core.handle(JobAdmitted(job=job_of("low", "moderator", [1], priority=-5)))
        core.handle(JobAdmitted(job=job_of("high", "moderator", [9], priority=5)))
        key = TurnKey(JobId("low"), "c0", "a0", 0)
        actions = core.handle(TurnRejected(key=key))
        assert [action.key for action in actions if isinstance(action, StartTurn)] == [key]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_reading_a_queue_changes_nothing(policy: str) -> None:
    """The heads of a queue are the next turns, and stay in it."""

    def run(*, is_looked_at: bool) -> list[TurnKey]:
        core = SchedulingCore(POLICIES[policy])
        core.handle(WorkerReady(worker="w", model="m", slots=1))
        core.handle(JobAdmitted(job=job_of("j", "free", [4, 7, 2])))
        core.handle(JobAdmitted(job=job_of("k", "chain", [3, 1])))
        started = [TurnKey(JobId("j"), "c0", "a0", 0)]
        for _ in range(30):
            if is_looked_at:
                core.view.queues.ready_heads(5)
            starts = [a.key for a in core.handle(TurnCompleted(key=started[-1])) if isinstance(a, StartTurn)]
            started += starts
        return started

    assert run(is_looked_at=True) == run(is_looked_at=False)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_outdated_entries_pile_up(policy: str) -> None:
    """A display reads the queue four times a second, and the queue may never be empty.

    Memory is that of waiting turns.
    """
    queue = POLICIES[policy]()
    queue.note_slots(1)
    for number in range(40):
        queue.push(_ready(f"big{number}", number, path=100.0))
    for number in range(2000):
        queue.note_load(JobId("j"), JobLoad(priority=0, work=100.0 - number / 30, model_work=9.0, path=50.0))
        queue.push(_ready(f"short{number}", 1000 + number, path=1.0))
        queue.heads(10)
        queue.pop()
    entries = [len(held) for held in vars(queue).values() if isinstance(held, list)]
    assert max(entries) < 600


def _ready(agent: str, order: int, path: float) -> ReadyTurn:
    key = TurnKey(JobId("j"), "c0", agent, 0)
    return ReadyTurn(
        key=key, job_priority=0, rounds_completed=0, conversation_order=0, agent_order=0, ready_order=order, path=path
    )


def test_an_abandoned_turn_never_starts() -> None:
    """In free mode another turn of the conversation starts in its place, never one that has failed before."""
    core = SchedulingCore(POLICIES["fifo"])
    job = free("A", "B", "C", rounds=2)
    job = replace(job, agents=tuple(replace(agent, on_failure=OnFailure.SKIP) for agent in job.agents))
    core.handle(WorkerReady(worker="w", model="m", slots=1))
    (first,) = (each.key for each in core.handle(JobAdmitted(job=job)) if isinstance(each, StartTurn))
    abandoned = {each.key for each in core.handle(ModelLost(model="m")) if isinstance(each, AbandonTurn)}
    assert {(key.agent_id, key.round) for key in abandoned} == {("B", 0), ("C", 0), ("B", 1), ("C", 1)}
    core.handle(ModelRegained(model="m"))
    told = core.handle(TurnCompleted(key=first))
    assert [each.key.agent_id for each in told if isinstance(each, StartTurn)] == ["A"]


def test_turns_of_a_lost_model_end_until_it_is_started_again() -> None:
    """Turns of a model without any worker fail; those that come while it is started again wait."""
    core = SchedulingCore(POLICIES["fifo"])
    core.handle(ModelLost(model="m"))
    told = core.handle(JobAdmitted(job=job_of("first", "chain", [1])))
    assert [type(action) for action in told] == [TurnIsReady, AbandonTurn, ConversationEnded, JobEnded]
    core.handle(ModelRegained(model="m"))
    core.handle(JobAdmitted(job=job_of("second", "chain", [1])))
    starts = [
        a.key.job_id for a in core.handle(WorkerReady(worker="w", model="m", slots=1)) if isinstance(a, StartTurn)
    ]
    assert starts == ["second"]
    assert set(core.view.of_all().values()) == {0, 1, 2}
