import time

import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId, SpokenBy, TurnKey
from service.conversations.job.states import ConversationState, JobState, TurnState, job_state_after
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    AwaitTurn,
    ContinueCancel,
    ContinueDispatch,
    ConversationEnded,
    ConversationStarted,
    CutOffTurn,
    Event,
    JobAdmitted,
    JobCancelled,
    JobEnded,
    Paused,
    StartTurn,
    TurnCompleted,
    TurnCutOff,
    TurnFailed,
    TurnInterrupted,
    TurnIsReady,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import CacheLocation
from tests.harness.jobs import DEBATE, agent, job, key

J = JobId("j")


def core(*, slots: int = 2, policy: str = "progress") -> SchedulingCore:
    made = SchedulingCore(POLICIES[policy])
    if slots:
        assert made.handle(WorkerReady(worker="w", model="m", slots=slots)) == []
    return made


def starts(actions: list[Action]) -> list[TurnKey]:
    return [action.key for action in actions if isinstance(action, StartTurn)]


def test_a_debate_runs_in_its_order() -> None:
    """Specification, "Rounds mode": a moderator waits for its participants, a round for the one before."""
    scheduler = core()
    assert scheduler.handle(JobAdmitted(job=job(*DEBATE, rounds=2))) == [
        TurnIsReady(key=key("a")),
        TurnIsReady(key=key("b")),
        ConversationStarted(job_id=J, conversation_id="c0"),
        StartTurn(key=key("a"), worker="w"),
        StartTurn(key=key("b"), worker="w"),
    ]
    assert scheduler.handle(TurnCompleted(key=key("b"))) == []
    assert scheduler.handle(TurnCompleted(key=key("a"))) == [
        TurnIsReady(key=key("m")),
        StartTurn(key=key("m"), worker="w"),
    ]
    assert starts(scheduler.handle(TurnCompleted(key=key("m")))) == [key("a", 1), key("b", 1)]
    scheduler.handle(TurnCompleted(key=key("a", 1)))
    assert starts(scheduler.handle(TurnCompleted(key=key("b", 1)))) == [key("m", 1)]
    assert scheduler.handle(TurnCompleted(key=key("m", 1))) == [
        ConversationEnded(job_id=J, conversation_id="c0", state=ConversationState.COMPLETED, reason=None, unspoken=()),
        JobEnded(job_id=J),
    ]


def test_no_more_is_in_flight_than_there_are_slots() -> None:
    """The service holds the only queue."""
    scheduler = core(slots=3)
    first = starts(scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=10))))
    assert first == [key("a", 0, number) for number in range(3)]
    for number in range(3, 10):
        assert starts(scheduler.handle(TurnCompleted(key=first.pop(0)))) == [key("a", 0, number)]
        first.append(key("a", 0, number))


def test_turns_wait_for_a_worker_of_their_model() -> None:
    """There is one pool of ready turns, and a capacity for each model."""
    scheduler = core(slots=0)
    assert starts(scheduler.handle(JobAdmitted(job=job(agent("a"), agent("x", model="other"))))) == []
    assert starts(scheduler.handle(WorkerReady(worker="o", model="other", slots=1))) == [key("x")]
    assert starts(scheduler.handle(WorkerReady(worker="w", model="m", slots=1))) == [key("a")]


def test_replicas_share_the_load() -> None:
    """The worker with the most free slots gets the next turn."""
    scheduler = core(slots=2)
    scheduler.handle(WorkerReady(worker="v", model="m", slots=2))
    actions = scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=4)))
    assert [action.worker for action in actions if isinstance(action, StartTurn)] == ["w", "v", "w", "v"]


def test_an_agent_returns_to_the_worker_that_cached_its_prompt() -> None:
    """When that worker is full, another takes the turn."""
    scheduler = core(slots=2)
    scheduler.handle(WorkerReady(worker="v", model="m", slots=2))

    def where(actions: list[Action]) -> dict[str, str]:
        return {a.key.conversation_id: a.worker for a in actions if isinstance(a, StartTurn)}

    first = where(scheduler.handle(JobAdmitted(job=job(agent("a"), rounds=3, conversations=4))))
    assert sorted(first.values()) == ["v", "v", "w", "w"]
    ends = [TurnCompleted(key=key("a", 0, number)) for number in (3, 2, 1, 0)]
    assert where(scheduler.handle(*ends)) == first
    scheduler.handle(WorkerNotReady(worker="w"))
    on_w = next(number for number in range(4) if first[f"c{number}"] == "w")
    on_v = next(number for number in range(4) if first[f"c{number}"] == "v")
    assert where(scheduler.handle(TurnCompleted(key=key("a", 1, on_w)))) == {}
    assert where(scheduler.handle(TurnCompleted(key=key("a", 1, on_v)))) != {}


def test_an_interrupted_turn_goes_first_and_to_another_worker() -> None:
    """An engine's failure is not the turn's failure."""
    scheduler = core(slots=1)
    scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=3)))
    scheduler.handle(WorkerNotReady(worker="w"))
    assert scheduler.handle(TurnInterrupted(key=key("a"))) == [TurnIsReady(key=key("a"))]
    assert scheduler.handle(WorkerReady(worker="v", model="m", slots=1)) == [StartTurn(key=key("a"), worker="v")]


def test_slots_of_a_lost_worker_are_not_used_twice() -> None:
    """A worker that returns while an old turn still runs on it has one slot less."""
    scheduler = core(slots=2)
    scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=3)))
    scheduler.handle(WorkerNotReady(worker="w"))
    assert starts(scheduler.handle(WorkerReady(worker="w", model="m", slots=2))) == []
    assert starts(scheduler.handle(TurnInterrupted(key=key("a")))) == [key("a")]


def test_a_failed_turn_ends_its_conversation_alone() -> None:
    """Specification, "States": only the requests of that conversation are removed."""
    scheduler = core(slots=4)
    scheduler.handle(JobAdmitted(job=job(*DEBATE, conversations=2)))
    assert scheduler.handle(TurnFailed(key=key("a"), reason="context_overflow")) == [CutOffTurn(key=key("b"))]
    ended = ConversationEnded(
        job_id=J,
        conversation_id="c0",
        state=ConversationState.FAILED,
        reason="context_overflow",
        unspoken=(key("m"),),
    )
    assert scheduler.handle(TurnCutOff(key=key("b"))) == [ended]
    for name in ("a", "b"):
        scheduler.handle(TurnCompleted(key=key(name, 0, 1)))
    assert scheduler.handle(TurnCompleted(key=key("m", 0, 1)))[-1] == JobEnded(job_id=J)


def test_a_cancelled_job_drops_waiting_turns_and_cuts_off_running_ones() -> None:
    """The job ends when the turns in flight have ended."""
    scheduler = core(slots=1)
    scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=3)))
    actions = scheduler.handle(JobCancelled(job_id=J))
    assert actions[0] == CutOffTurn(key=key("a"))
    dropped = [action.conversation_id for action in actions if isinstance(action, ConversationEnded)]
    assert dropped == ["c1", "c2"]
    assert scheduler.handle(JobCancelled(job_id=J)) == []
    assert scheduler.handle(TurnCutOff(key=key("a")))[-1] == JobEnded(job_id=J)
    assert scheduler.handle(JobCancelled(job_id=J)) == []


def test_an_answer_that_arrives_with_the_cancel_is_kept() -> None:
    """The answer is recorded; the conversation is cancelled nevertheless."""
    scheduler = core()
    scheduler.handle(JobAdmitted(job=job(*DEBATE)))
    scheduler.handle(JobCancelled(job_id=J))
    assert scheduler.handle(TurnCompleted(key=key("a"))) == []
    ended = scheduler.handle(TurnCompleted(key=key("b")))[0]
    assert isinstance(ended, ConversationEnded)
    assert (ended.state, ended.unspoken) == (ConversationState.CANCELLED, (key("m"),))


def test_nothing_starts_while_the_core_closes() -> None:
    """Closing admits nothing new and lets running turns end."""
    scheduler = core(slots=1)
    scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=2)))
    assert scheduler.handle(Paused()) == []
    actions = scheduler.handle(TurnCompleted(key=key("a")))
    assert starts(actions) == []
    assert isinstance(actions[0], ConversationEnded)


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ((("a", 0), ("b", 0)), [key("m", 0)]),
        ((("a", 0),), [key("b", 0)]),
        ((("a", 0), ("b", 0), ("m", 0), ("b", 1)), [key("a", 1)]),
    ],
)
def test_a_job_resumes_after_its_last_finished_turn(ended: tuple[tuple[str, int], ...], expected: list[object]) -> None:
    """After a crash only the turns that were in flight run again."""
    scheduler = core()
    done = {key(name, number): (TurnState.COMPLETED, None) for name, number in ended}
    assert starts(scheduler.handle(JobAdmitted(job=job(*DEBATE, rounds=2), ended=done))) == expected


def test_an_end_that_was_not_recorded_is_recorded_again() -> None:
    """A crash between the last turn and the end of the job leaves nothing open: the end is idempotent."""
    scheduler = core()
    done = {key(name): (TurnState.COMPLETED, None) for name in "abm"}
    actions = scheduler.handle(JobAdmitted(job=job(*DEBATE), ended=done))
    assert actions[-1] == JobEnded(job_id=J)
    failed = {key("a"): (TurnState.FAILED, "poisoned"), key("b"): (TurnState.COMPLETED, None)}
    actions = scheduler.handle(JobAdmitted(job=job(*DEBATE), ended=failed))
    assert actions[-1] == JobEnded(job_id=J)
    assert isinstance(actions[0], ConversationEnded)
    assert (actions[0].reason, actions[0].unspoken) == ("poisoned", (key("m"),))


def test_late_news_of_a_turn_not_in_flight_changes_nothing() -> None:
    """A result counts once."""
    scheduler = core()
    scheduler.handle(JobAdmitted(job=job(*DEBATE)))
    scheduler.handle(TurnCompleted(key=key("a")))
    events: list[Event] = [TurnCompleted(key=key("a")), TurnFailed(key=key("a"), reason="x"), TurnCutOff(key=key("m"))]
    assert [scheduler.handle(event) for event in events] == [[], [], []]


def test_free_slots_are_those_that_no_turn_waits_for() -> None:
    """``queue=false`` asks how many first turns would start at once."""
    scheduler = core(slots=3)
    assert (scheduler.view.free("m"), scheduler.view.free("none")) == (3, 0)
    scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=2)))
    assert scheduler.view.free("m") == 1
    scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=5, name="k")))
    assert scheduler.view.free("m") == -4


def test_a_huge_job_is_cancelled_in_pieces() -> None:
    """Turns in flight end first. No turn of the job starts meanwhile, and each ends once."""
    scheduler = core(slots=2)
    big = job(agent("a"), agent("b"), rounds=100, conversations=50)  # 10,000 turns
    first = starts(scheduler.handle(JobAdmitted(job=big)))
    actions = scheduler.handle(JobCancelled(job_id=J))
    assert [action.key for action in actions if isinstance(action, CutOffTurn)] == first
    scheduler.handle(*(TurnCutOff(key=turn) for turn in first))
    ended, pieces = [], 1
    while any(isinstance(action, ContinueCancel) for action in actions):
        assert sum(len(each.unspoken) for each in actions if isinstance(each, ConversationEnded)) <= 1200
        ended += [each for each in actions if isinstance(each, ConversationEnded)]
        actions = scheduler.handle(JobCancelled(job_id=J))
        assert starts(actions) == []
        pieces += 1
    ended += [each for each in actions if isinstance(each, ConversationEnded)]
    assert pieces >= 9
    assert len({each.conversation_id for each in ended}) == len(ended) >= 49
    assert JobEnded(job_id=J) in actions
    assert set(scheduler.view.of_all().values()) == {0}


def test_turns_of_a_cancelled_job_are_passed_over_in_pieces() -> None:
    """Turns behind them start within a moment, and no step takes long."""
    scheduler = core(slots=1)
    (first,) = starts(scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=5000))))
    scheduler.handle(JobAdmitted(job=job(agent("a"), name="k")))
    actions = scheduler.handle(JobCancelled(job_id=J), TurnCutOff(key=first))
    pieces = 1
    while ContinueDispatch() in actions:
        assert starts(actions) == []
        actions = scheduler.handle()
        pieces += 1
    assert pieces == 4
    assert [turn.job_id for turn in starts(actions)] == ["k"]


def test_turns_that_were_never_made_are_made_when_asked_for() -> None:
    """One conversation may have a quarter of a million of them."""
    scheduler = core(slots=1)
    scheduler.handle(JobAdmitted(job=job(agent("a"), agent("b"), rounds=100_000)))
    spent = time.thread_time()
    actions = scheduler.handle(JobCancelled(job_id=J), TurnCutOff(key=key("a")))
    assert time.thread_time() - spent < 0.05
    (ended,) = [action for action in actions if isinstance(action, ConversationEnded)]
    assert (len(ended.unspoken), next(iter(ended.unspoken))) == (199_999, key("b"))


def test_a_job_with_ended_conversations_goes_on_with_the_others() -> None:
    """A crash between the ends of two conversations loses neither the job nor the service."""
    scheduler = core(slots=1)
    done = {key("a", 0, number): (TurnState.COMPLETED, None) for number in (0, 2)}
    actions = scheduler.handle(JobAdmitted(job=job(agent("a"), conversations=3), ended=done))
    assert [action.conversation_id for action in actions if isinstance(action, ConversationEnded)] == ["c0", "c2"]
    assert starts(actions) == [key("a", 0, 1)]
    assert scheduler.handle(TurnCompleted(key=key("a", 0, 1)))[-1] == JobEnded(job_id=J)


def test_a_cancel_from_an_earlier_run_is_carried_out_and_starts_nothing() -> None:
    """The request to cancel is durable, and so is its result."""
    scheduler = core(slots=2)
    done = {key("a"): (TurnState.CANCELLED, "cancelled"), key("a", 0, 1): (TurnState.COMPLETED, None)}
    event = JobAdmitted(job=job(agent("a"), conversations=3), ended=done, is_cancelled=True)
    actions = scheduler.handle(event)
    assert starts(actions) == []
    states = [action.state for action in actions if isinstance(action, ConversationEnded)]
    assert states == [ConversationState.CANCELLED, ConversationState.COMPLETED, ConversationState.CANCELLED]
    assert actions[-1] == JobEnded(job_id=J)


@pytest.mark.parametrize(("failed", "cut_off"), [("a", "b"), ("b", "a")])
def test_a_failure_stays_the_reason_of_the_end_after_a_crash(failed: str, cut_off: str) -> None:
    """A crash while the conversation's other turns were being cut off does not change the reason."""
    scheduler = core()
    done = {key(failed): (TurnState.FAILED, "poisoned"), key(cut_off): (TurnState.CANCELLED, "cancelled")}
    ended = scheduler.handle(JobAdmitted(job=job(*DEBATE), ended=done))[0]
    assert isinstance(ended, ConversationEnded)
    assert (ended.state, ended.reason) == (ConversationState.FAILED, "poisoned")


def test_progress_prefers_conversations_that_are_further() -> None:
    """Specification, "Scheduling policies": more completed rounds come first, then older conversations."""
    scheduler = core(slots=1)
    scheduler.handle(JobAdmitted(job=job(agent("a"), rounds=2, conversations=2)))
    assert starts(scheduler.handle(TurnCompleted(key=key("a")))) == [key("a", 1)]
    fifo = core(slots=1, policy="fifo")
    fifo.handle(JobAdmitted(job=job(agent("a"), rounds=2, conversations=2)))
    assert starts(fifo.handle(TurnCompleted(key=key("a")))) == [key("a", 0, 1)]


def test_a_larger_priority_goes_first_across_jobs() -> None:
    """Specification, "Scheduling policies": the larger number goes first."""
    scheduler = core(slots=0)
    scheduler.handle(JobAdmitted(job=job(agent("a"), name="low")))
    scheduler.handle(JobAdmitted(job=job(agent("a"), name="high", priority=1)))
    assert starts(scheduler.handle(WorkerReady(worker="w", model="m", slots=1))) == [key("a", name="high")]


@pytest.mark.parametrize(
    ("ended", "was_cancelled", "state"),
    [
        ({ConversationState.COMPLETED}, False, JobState.COMPLETED),
        ({ConversationState.FAILED}, False, JobState.FAILED),
        ({ConversationState.COMPLETED, ConversationState.FAILED}, False, JobState.COMPLETED_WITH_FAILURES),
        ({ConversationState.COMPLETED, ConversationState.CANCELLED}, True, JobState.CANCELLED),
    ],
)
def test_a_job_ends_as_its_conversations_did(
    ended: set[ConversationState], was_cancelled: bool, state: JobState
) -> None:
    """Specification, "States"."""
    assert job_state_after(frozenset(ended), was_cancelled=was_cancelled) is state


def wide(slots: int, name: str = "wide") -> JobAdmitted:
    return JobAdmitted(job=job(replace(agent("a"), slots=slots), name=name))


def test_a_wide_turn_takes_its_slots_together() -> None:
    """It starts on a worker with enough free slots, and returns all of them."""
    scheduler = core(slots=3)
    assert starts(scheduler.handle(JobAdmitted(job=job(agent("a")))))
    (started,) = [action for action in scheduler.handle(wide(2)) if isinstance(action, StartTurn)]
    assert started == StartTurn(key=key("a", name="wide"), worker="w", slots=2)
    assert starts(scheduler.handle(JobAdmitted(job=job(agent("a"), name="late")))) == []
    assert starts(scheduler.handle(TurnCompleted(key=key("a", name="wide")))) == [key("a", name="late")]
    assert scheduler.view.free("m") == 1


def test_a_turn_wider_than_every_worker_takes_all_of_one() -> None:
    """Whether the engine can serve that many answers is for the engine to decide."""
    scheduler = core(slots=2)
    (started,) = [action for action in scheduler.handle(wide(9)) if isinstance(action, StartTurn)]
    assert started.slots == 2


def test_a_wide_turn_is_not_passed_for_ever() -> None:
    """Narrow turns may go ahead while it lacks slots. After some of them slots are reserved for it."""
    scheduler = core(slots=2)
    scheduler.handle(JobAdmitted(job=job(agent("a"), name="n0")))
    assert starts(scheduler.handle(wide(2))) == []
    passed = 0
    for number in range(1, 20):
        running = [each.key for each in scheduler.handle(JobAdmitted(job=job(agent("a"), name=f"n{number}")))
                   if isinstance(each, StartTurn)]  # fmt: skip
        passed += len(running)
        for each in running:
            scheduler.handle(TurnCompleted(key=each))
    assert 0 < passed < 19
    assert starts(scheduler.handle(TurnCompleted(key=key("a", name="n0")))) == [key("a", name="wide")]


def test_slots_are_reserved_on_one_worker_alone() -> None:
    """Other turns go on starting on the model's other workers. Idle reserved slots are reported."""
    scheduler = core(slots=3, policy="fifo")
    scheduler.handle(WorkerReady(worker="v", model="m", slots=3))
    first = JobAdmitted(job=job(agent("a"), name="first", conversations=6))
    running = [action for action in scheduler.handle(first) if isinstance(action, StartTurn)]
    scheduler.handle(wide(3))
    scheduler.handle(JobAdmitted(job=job(agent("a"), name="others", conversations=30)))
    idle, begun = [], list[list[StartTurn]]()
    while not any(each.key.job_id == "wide" for each in running):
        ended = running.pop(0)
        begun.append([each for each in scheduler.handle(TurnCompleted(key=ended.key)) if isinstance(each, StartTurn)])
        running += begun[-1]
        idle.append(scheduler.reserved.get(key("a", name="wide"), 0))
    idle, begun = idle[:-1], begun[:-1]
    assert idle[idle.index(1) :] == [1, 1, 2, 2], "each second end is on the other worker"
    ends = zip(idle, [0, *idle], begun, strict=False)
    assert all((now > before) != bool(started) for now, before, started in ends), "another starts, or one slot is kept"
    (started,) = [each for each in running if each.key.job_id == "wide"]
    assert started.slots == 3
    assert scheduler.reserved == {}


def test_no_slot_is_reserved_that_no_other_turn_would_take() -> None:
    """Such slots are idle anyway."""
    scheduler = core(slots=2)
    scheduler.handle(JobAdmitted(job=job(agent("a"), name="n0")))
    scheduler.handle(wide(2))
    for number in range(1, 10):
        for each in starts(scheduler.handle(JobAdmitted(job=job(agent("a"), name=f"n{number}")))):
            scheduler.handle(TurnCompleted(key=each))
    assert scheduler.reserved == {key("a", name="wide"): 1}
    scheduler.handle(JobCancelled(job_id=JobId("n9")))
    assert scheduler.reserved == {}


def test_a_first_turn_may_be_cached_already() -> None:
    """A client's program returns to its worker, even if another has more free slots."""
    scheduler = core(slots=2)
    scheduler.handle(WorkerReady(worker="v", model="m", slots=4))
    cached = {key("a"): CacheLocation(worker="w", tokens=100)}
    (started,) = [
        action
        for action in scheduler.handle(JobAdmitted(job=job(agent("a")), cached=cached))
        if isinstance(action, StartTurn)
    ]
    assert started.worker == "w"


def test_turns_of_callers_are_in_no_pool() -> None:
    """Specification, "Three pools": only a model's turns are in a pool, in the total and in the count of the model."""
    scheduler = core()
    caller = replace(agent("b", waits=["a"], model=""), by=SpokenBy.CALLER)
    scheduler.handle(JobAdmitted(job=job(agent("a"), caller, agent("c"), rounds=2)))
    pools = {TurnState.PENDING: 2, TurnState.READY: 0, TurnState.IN_FLIGHT: 2}
    assert (scheduler.view.of_all(), scheduler.view.by_model()) == (pools, {"m": pools})
    assert AwaitTurn(key=key("b")) in scheduler.handle(TurnCompleted(key=key("a")))
    pools[TurnState.IN_FLIGHT] = 1
    assert (scheduler.view.of_all(), scheduler.view.by_model()) == (pools, {"m": pools})
