"""What follows from the end of an attempt, as callers are told of it."""

from datetime import UTC, datetime
from typing import cast

import pytest

from service.scheduling.core.blame import Blame, Trial
from service.scheduling.core.events import TurnInterrupted
from service.scheduling.jobs.attempt import RunningAttempt
from service.scheduling.jobs.job_attempt import JobAttempt, JobTurnsState
from service.scheduling.jobs.lent_slots import LentSlots
from service.scheduling.jobs.prompts import JobPrompts
from service.scheduling.jobs.turn import TurnRun
from service.scheduling.jobs.turns import Turns
from service.scheduling.turn_endings import TurnEndings
from service.scheduling.work import RunCounters, SchedulerStore
from service.store.records import TurnRequeued
from tests.harness.jobs import agent, job, key
from workers.fleet import Fleet
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason


def running(blame: Blame | None = None) -> tuple[JobAttempt, TurnEndings, TurnRun]:
    """Return an attempt that is on a slot, who takes its end, and its turn."""
    run = TurnRun(key("a", 0, 0), agent("a"), datetime.now(UTC), RunningAttempt("w", 1))
    outlet = cast("SchedulerStore", None)  # it is not asked
    posted = job(agent("a"))
    slots = LentSlots(cast("Fleet", None), lambda _event: None)
    state = JobTurnsState(
        jobs={posted.id: JobPrompts(posted)}, turns=Turns(), outlet=outlet, counters=RunCounters(), slots=slots
    )
    return JobAttempt(run, state), TurnEndings(blame or Blame(), lambda _key: "m", lambda _worker: None), run


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
    """An update with mode: abort is no stop of the service: whoever watches is told what the transcript says."""
    attempt, endings, run = running()
    (record,) = endings.take_end(attempt, Cancelled(reason=cause)).records
    assert isinstance(record, TurnRequeued)
    assert (record.reason, run.attempts[-1].reason) == (reason, reason)
    assert record.used is not None
    assert (record.used[1].turns, record.used[1].attempts) == (0, 1)


@pytest.mark.parametrize(("beside", "trial"), [(False, Trial.FIRST), (True, Trial.NEXT)])
async def test_who_died_alone_is_tried_first_and_who_had_company_next(*, beside: bool, trial: Trial) -> None:
    """The core is told what blame has decided."""
    blame = Blame()
    attempt, endings, run = running(blame)
    if beside:
        blame.start(key("a", 0, 1), "m", "w", 1)
    blame.start(run.key, "m", "w", 1)
    died = EngineFailed(reason=FailureReason.ENGINE_DIED, detail="it exited", brought_down=True)
    event = endings.take_end(attempt, died).event
    assert isinstance(event, TurnInterrupted)
    assert event.trial is trial
