"""Events and charges at the end of an attempt, as callers get them."""

from datetime import UTC, datetime
from typing import cast

import pytest

from service.conversations.job.states import TurnState
from service.conversations.record.transcript import UnfinishedTurn
from service.scheduling.asking.composed import AskingSurroundings
from service.scheduling.asking.lent_slots import LentSlots
from service.scheduling.asking.prompts import JobPrompts
from service.scheduling.attempt import RunningAttempt
from service.scheduling.core.blame import Blame, Trial
from service.scheduling.core.events import TurnInterrupted
from service.scheduling.keeping.turn import JobTurn, TurnSurroundings
from service.scheduling.turn_endings import TurnEndings
from service.scheduling.work import RunCounters, SchedulerStore
from service.store.records import TurnRequeued
from tests.harness.jobs import agent, job, key
from transport.events import Usage
from workers.fleet import Fleet
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason


def running(blame: Blame | None = None) -> tuple[JobTurn, TurnEndings]:
    """Return a turn that is on a slot, and the object that takes the end of its attempt."""
    outlet = cast("SchedulerStore", None)  # it is not asked
    posted = job(agent("a"))
    slots = LentSlots(cast("Fleet", None), lambda _event: None)
    around = TurnSurroundings(
        jobs={posted.id: JobPrompts(posted)},
        note_end=lambda _turn: None,
        counters=RunCounters(),
        asking=AskingSurroundings(outlet=outlet, slots=slots),
    )
    now, so_far = datetime.now(UTC), UnfinishedTurn(key=key("a", 0, 0), queued_at=datetime.now(UTC))
    turn = JobTurn(so_far.key, RunningAttempt("w", 1), now, so_far, around)
    return turn, TurnEndings(blame or Blame(), lambda _key: "m", lambda _worker: None)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (CancelReason.WEIGHTS, "weights_changed"),
        (CancelReason.SHUTDOWN, "shutdown"),
        (CancelReason.LEASE_LOST, "shutdown"),
        (CancelReason.SLOT_LOST, "slot_lost"),
    ],
)
async def test_an_event_and_its_attempt_name_the_same_reason(cause: CancelReason, reason: str) -> None:
    """A weight update with mode: abort is not a stop of the service: events give the same reason as the transcript."""
    turn, endings = running()
    (record,) = endings.take_end(turn, Cancelled(reason=cause)).records
    assert isinstance(record, TurnRequeued)
    assert (record.reason, turn.attempts[-1].reason) == (reason, reason)
    assert record.used is not None
    assert (record.used[1].turns, record.used[1].attempts) == (0, 1)


@pytest.mark.parametrize(("beside", "trial"), [(False, Trial.FIRST), (True, Trial.NEXT)])
async def test_a_turn_that_died_alone_is_tried_first_and_one_among_others_next(*, beside: bool, trial: Trial) -> None:
    """The core gets blame's decision."""
    blame = Blame()
    turn, endings = running(blame)
    if beside:
        blame.start(key("a", 0, 1), "m", "w", 1)
    blame.start(turn.key, "m", "w", 1)
    died = EngineFailed(reason=FailureReason.ENGINE_DIED, detail="it exited", brought_down=True)
    event = endings.take_end(turn, died).event
    assert isinstance(event, TurnInterrupted)
    assert event.trial is trial


async def test_a_turn_is_charged_with_the_summary_made_on_its_slot() -> None:
    """Otherwise a key would get its long summaries for free."""
    attempt, summary = RunningAttempt("w", 1), RunningAttempt("w", 1)
    attempt.answer.generation.usage, summary.answer.generation.usage = Usage(100, 10, 90), Usage(1000, 200, 900)
    attempt.seconds, summary.seconds, attempt.summary = 1.0, 4.0, summary
    spent = attempt.spent(key("a", 0, 0))
    assert (spent.fresh_tokens, spent.answer_tokens, spent.seconds) == (110, 210, 5.0)
    assert spent.is_told


@pytest.mark.parametrize(("is_lost", "tokens", "slot_s"), [(False, 20, 1.0), (True, 320, 5.0)])
async def test_a_summary_is_counted_once_if_its_turn_fails(*, is_lost: bool, tokens: int, slot_s: float) -> None:
    """A recorded summary counts itself; a summary lost with its engine is counted by its turn."""
    attempt, summary = RunningAttempt("w", 1), RunningAttempt("w", 1)
    attempt.answer.generation.usage, summary.answer.generation.usage = Usage(100, 10, 90), Usage(1000, 200, 900)
    attempt.seconds, summary.seconds = 1.0, 4.0
    attempt.summary, attempt.loses_summary = summary, is_lost
    used = attempt.measures("m", TurnState.FAILED, "engine_died").used
    assert (used.wasted_tokens, used.slot_s, used.attempts) == (tokens, slot_s, 1)
