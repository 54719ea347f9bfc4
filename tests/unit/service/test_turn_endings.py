"""What follows from the end of an attempt, as callers are told of it."""

from datetime import UTC, datetime

import pytest

from service.scheduling.attempt import RunningAttempt
from service.scheduling.core.blame.blame import Blame
from service.scheduling.counts import RunCounters
from service.scheduling.prompts import JobPrompts
from service.scheduling.turn import TurnRun
from service.scheduling.turn_endings import TurnEndings
from service.scheduling.turns import Turns
from service.store.records import TurnRequeued
from tests.harness.jobs import agent, job, key
from workers.outcome import Cancelled, CancelReason


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (CancelReason.WEIGHTS, "weights_changed"),
        (CancelReason.SHUTDOWN, "shutdown"),
        (CancelReason.LEASE_LOST, "shutdown"),
    ],
)
async def test_an_event_and_its_attempt_name_the_same_reason(cause: CancelReason, reason: str) -> None:
    """An update with mode: abort is no stop of the service: whoever watches is told what the transcript says."""
    run = TurnRun(key("a", 0, 0), agent("a"), datetime.now(UTC), RunningAttempt("w", 1))
    posted = job(agent("a"))
    endings = TurnEndings({posted.id: JobPrompts(posted)}, Turns(), Blame(), RunCounters(), lambda _worker: None)
    record = endings.take_end(run, Cancelled(reason=cause)).record
    assert isinstance(record, TurnRequeued)
    assert (record.reason, run.attempts[-1].reason) == (reason, reason)
    assert record.used is not None
    assert (record.used[1].turns, record.used[1].attempts) == (0, 1)
