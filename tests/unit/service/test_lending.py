"""Slots of turns whose tools run (specification, "While tools run")."""

from msgspec.structs import replace

from service.conversations.job.job import Agent, TurnKey
from service.scheduling.core.blame import Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    JobAdmitted,
    LendingDue,
    LendSlot,
    LendSlotLater,
    LoseSlot,
    Paused,
    StartTurn,
    TakeBackSlot,
    ToolsBegan,
    ToolsEnded,
    TurnCompleted,
    TurnInterrupted,
    TurnIsReady,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from tests.harness.jobs import agent, job, key

READ_S = 0.01  # a token
TOKENS = 300
A, B = key("a"), key("a", conversation=1)


def core(slots: int = 1, conversations: int = 2, speaker: Agent | None = None) -> SchedulingCore:
    made = SchedulingCore(POLICIES["fifo"])
    made.handle(WorkerReady(worker="w", model="m", slots=slots, read_s=READ_S))
    made.handle(JobAdmitted(job=job(speaker or agent("a"), conversations=conversations)))
    return made


def began(turn: TurnKey = A, *tools: str) -> ToolsBegan:
    return ToolsBegan(key=turn, model="m", tools=tools or ("look",), context_tokens=TOKENS)


def ended(turn: TurnKey = A, seconds: float = 9.0) -> ToolsEnded:
    return ToolsEnded(key=turn, tools=("look",), seconds=seconds)


def starts(actions: list[Action]) -> list[TurnKey]:
    return [action.key for action in actions if isinstance(action, StartTurn)]


def lent(scheduler: SchedulingCore, turn: TurnKey = A) -> list[Action]:
    (hold,) = scheduler.handle(began(turn))
    assert isinstance(hold, LendSlotLater)
    return scheduler.handle(LendingDue(key=turn, number=hold.number))


def test_a_slot_is_kept_for_as_long_as_reading_again_would_take() -> None:
    """Then a waiting turn gets it."""
    scheduler = core()
    assert scheduler.handle(began()) == [LendSlotLater(key=A, number=1, seconds=TOKENS * READ_S)]
    actions = scheduler.handle(LendingDue(key=A, number=1))
    assert (actions[0], starts(actions)) == (LendSlot(key=A), [B])


def test_a_tool_that_has_been_slow_lends_its_slot_at_once() -> None:
    """A tool that has always been quick keeps the slot for the whole time."""
    scheduler = core()
    scheduler.handle(began())
    assert scheduler.handle(ended(seconds=9.0)) == []
    assert scheduler.handle(began()) == [LendSlotLater(key=A, number=2, seconds=0.0)]
    assert scheduler.handle(began(A, "other")) == [LendSlotLater(key=A, number=3, seconds=TOKENS * READ_S)]


def test_a_tool_that_ends_in_time_lends_nothing() -> None:
    """Its timer fires late, and may belong to an earlier message."""
    scheduler = core()
    scheduler.handle(began())
    scheduler.handle(ended(seconds=0.5))
    assert scheduler.handle(LendingDue(key=A, number=1)) == []
    scheduler.handle(began())
    assert scheduler.handle(LendingDue(key=A, number=1)) == []


def test_a_turn_that_has_lent_its_slot_goes_before_all_that_wait() -> None:
    """No running turn loses its slot for it."""
    scheduler = core(conversations=3)
    lent(scheduler)
    assert scheduler.handle(ended()) == []
    assert scheduler.handle(TurnCompleted(key=B))[-1] == TakeBackSlot(key=A, worker="w")
    (*_, start) = scheduler.handle(TurnCompleted(key=A))
    assert start == StartTurn(key=key("a", conversation=2), worker="w")


def test_a_slot_that_was_lent_to_no_turn_is_taken_back_at_once() -> None:
    """This holds even while nothing may start, since a turn in flight goes on."""
    scheduler = core(conversations=1)
    scheduler.handle(Paused())
    assert lent(scheduler) == [LendSlot(key=A)]
    assert scheduler.handle(ended()) == [TakeBackSlot(key=A, worker="w")]


def test_a_worker_that_was_lost_meanwhile_counts_as_another() -> None:
    """Its engine may have other weights, or no cache; the turn runs again, ahead of all that wait."""
    scheduler = core(conversations=1)
    lent(scheduler)
    scheduler.handle(WorkerNotReady(worker="w"))
    scheduler.handle(WorkerReady(worker="w", model="m", slots=1))
    assert scheduler.handle(ended()) == [LoseSlot(key=A)]
    assert scheduler.handle(TurnInterrupted(key=A)) == [TurnIsReady(key=A), StartTurn(key=A, worker="w")]


def test_a_turn_that_waits_for_its_slot_learns_that_the_worker_is_lost() -> None:
    """Otherwise it would wait for ever."""
    scheduler = core()
    lent(scheduler)
    scheduler.handle(ended())
    assert scheduler.handle(WorkerNotReady(worker="w")) == [LoseSlot(key=A)]
    assert scheduler.handle(WorkerReady(worker="w", model="m", slots=1)) == []


def test_a_suspect_in_its_trial_lends_nothing() -> None:
    """The next death must have one possible cause."""
    scheduler = core()
    scheduler.handle(TurnInterrupted(key=A, trial=Trial.NEXT))
    scheduler.handle(TurnCompleted(key=B))
    assert scheduler.handle(began()) == []


def test_no_turn_returns_to_a_worker_that_tries_a_suspect() -> None:
    """It waits for the end of the trial, and a suspect may be tried while the other turns' tools run."""
    scheduler = core(slots=2)
    lent(scheduler, A)
    assert scheduler.handle(TurnInterrupted(key=B, trial=Trial.NEXT)) == [
        TurnIsReady(key=B),
        StartTurn(key=B, worker="w", is_suspect=True),
    ]
    assert scheduler.handle(ended()) == []
    assert TakeBackSlot(key=A, worker="w") in scheduler.handle(TurnCompleted(key=B))


def test_a_turn_on_several_slots_keeps_them() -> None:
    """Taken back later, it might wait for all of them at once."""
    speaker = replace(agent("a"), slots=2)
    assert core(slots=2, conversations=1, speaker=speaker).handle(began()) == []


def test_a_timer_of_an_attempt_that_has_ended_lends_nothing() -> None:
    """The attempt's engine died while its tools ran, and now the turn writes on another slot."""
    scheduler = core(conversations=1)
    (hold,) = scheduler.handle(began())
    assert isinstance(hold, LendSlotLater)
    scheduler.handle(TurnInterrupted(key=A))
    assert scheduler.handle(LendingDue(key=A, number=hold.number)) == []


def test_an_end_while_the_slot_is_lent_takes_no_slot_from_others() -> None:
    """The job is cancelled while its tool runs."""
    scheduler = core(conversations=3)
    lent(scheduler)
    assert starts(scheduler.handle(TurnInterrupted(key=A))) == []
    assert scheduler.handle(ended()) == []
    (*_, start) = scheduler.handle(TurnCompleted(key=B))
    assert start == StartTurn(key=A, worker="w")


def test_a_large_turn_has_its_room_back_before_others_start() -> None:
    """It needs room in the KV cache: small turns that follow each other would keep it out for ever."""
    scheduler = SchedulingCore(POLICIES["fifo"])
    scheduler.handle(WorkerReady(worker="w", model="m", slots=4, kv_tokens=1000, most_answer=10))
    scheduler.handle(JobAdmitted(job=job(replace(agent("a"), params={"max_tokens": 700}))))
    assert lent(scheduler) == [LendSlot(key=A)]
    small = job(replace(agent("s"), params={"max_tokens": 350}), conversations=6, name="k")
    begun = starts(scheduler.handle(JobAdmitted(job=small)))
    assert len(begun) == 2
    assert scheduler.handle(ended()) == []
    assert starts(scheduler.handle(TurnCompleted(key=begun[0]))) == []
    actions = scheduler.handle(TurnCompleted(key=begun[1]))
    assert TakeBackSlot(key=A, worker="w") in actions
    assert starts(actions) == []
