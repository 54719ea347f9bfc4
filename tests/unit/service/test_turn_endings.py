"""What follows from the end of an attempt, as callers are told of it."""

from datetime import UTC, datetime
from typing import cast

import pytest

from service.scheduling.attempt import RunningAttempt
from service.scheduling.core.blame.blame import Blame
from service.scheduling.counts import RunCounters
from service.scheduling.job_attempt import JobAttempt, JobTurnsState
from service.scheduling.lent_slots import LentSlots
from service.scheduling.outlet import SchedulerStore
from service.scheduling.prompts import JobPrompts
from service.scheduling.turn import TurnRun
from service.scheduling.turn_endings import TurnEndings
from service.scheduling.turns import Turns
from service.store.records import TurnRequeued
from tests.harness.jobs import agent, job, key
from workers.fleet import Fleet
from workers.outcome import Cancelled, CancelReason


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
    run = TurnRun(key("a", 0, 0), agent("a"), datetime.now(UTC), RunningAttempt("w", 1))
    outlet = cast("SchedulerStore", None)  # it is not asked
    posted = job(agent("a"))
    slots = LentSlots(cast("Fleet", None), lambda _event: None)
    state = JobTurnsState(
        jobs={posted.id: JobPrompts(posted)}, turns=Turns(), outlet=outlet, counters=RunCounters(), slots=slots
    )
    endings = TurnEndings(Blame(), lambda _key: "m", lambda _worker: None)
    (record,) = endings.take_end(JobAttempt(run, state), Cancelled(reason=cause)).records
    assert isinstance(record, TurnRequeued)
    assert (record.reason, run.attempts[-1].reason) == (reason, reason)
    assert record.used is not None
    assert (record.used[1].turns, record.used[1].attempts) == (0, 1)
