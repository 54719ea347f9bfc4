import pytest

from service.conversations.record.transcript import Charges
from service.scheduling.core.deaths import TurnRecord, refuse
from workers.outcome import EngineFailed, FailureReason

REJECTED, UNREACHABLE = FailureReason.ENGINE_REJECTED, FailureReason.ENGINE_UNREACHABLE
WELL = TurnRecord(acquitted=100)


def refusal(reason: FailureReason = REJECTED, *, proved: bool = True) -> EngineFailed:
    return EngineFailed(reason=reason, detail="", brought_down=False, is_proved=proved)


def refused(
    failures: list[EngineFailed], record: TurnRecord = WELL, every_s: float = 1.0, asked_s: float = 0.5
) -> FailureReason | None:
    """Return why a turn fails at the last of these refusals, after none of the earlier ones failed it."""
    charges, reason = Charges(), None
    for number, failed in enumerate(failures):
        assert reason is None, f"given up before refusal {number}"
        now = number * every_s
        charges, reason = refuse(charges, failed, now, asked_s=asked_s, refusal_s=300.0, record=record)
    return reason


@pytest.mark.parametrize(
    ("failures", "record", "ending"),
    [
        ([refusal()] * 4, WELL, None),
        ([refusal()] * 5, WELL, REJECTED),
        ([refusal(), refusal(UNREACHABLE)] * 2 + [refusal(UNREACHABLE)], WELL, UNREACHABLE),
        ([refusal(proved=False)] * 99, WELL, None),
        ([refusal(FailureReason.ENGINE_DIED)] * 99, WELL, None),  # killed for another turn's silence
        ([refusal()] * 9, TurnRecord(), None),  # nothing is known of the engine yet
        ([refusal()] * 10, TurnRecord(), REJECTED),
        ([refusal()] * 6, TurnRecord(acquitted=100, unexplained=40), None),  # it refuses a third of all requests
        ([refusal()] * 7, TurnRecord(acquitted=100, unexplained=40), REJECTED),
    ],
)
def test_a_refusal_counts_against_a_turn_only_if_others_were_answered(
    failures: list[EngineFailed], record: TurnRecord, ending: FailureReason | None
) -> None:
    """Design notes, evidence and verdicts: an engine that refuses every turn proves nothing about any."""
    assert refused(failures, record) is ending


def test_a_turn_is_not_refused_for_ever() -> None:
    """``refusal_s`` bounds the time from the first refusal, and the engine is not blamed."""
    assert refused([refusal(proved=False)] * 301) is REJECTED
    assert refused([refusal(proved=False)] * 300) is None
    charges, _ = refuse(Charges(refused_at=1.0), refusal(proved=False), 1e9, asked_s=1.0, refusal_s=None, record=WELL)
    assert charges == Charges(refused_at=1e9, refused_s=31.0)


def test_a_time_without_requests_is_no_refusal() -> None:
    """A stopped service, an engine that loads for an hour and a clock that is set refuse no turn."""
    assert refused([refusal(proved=False)] * 3, every_s=8 * 3600.0) is None
    assert refused([refusal(proved=False)] * 3, every_s=-3600.0) is None


def test_a_turn_that_stalls_again_and_again_fails() -> None:
    """If its engine answers others, or a canary, five stalls are the turn's own (jobs.md, errors)."""
    stalled = refusal(FailureReason.STALLED_PREFILL)
    assert refused([stalled] * 4, TurnRecord()) is None
    assert refused([stalled] * 5, TurnRecord()) is FailureReason.STALLED_PREFILL
    silent = refusal(FailureReason.STALLED_PREFILL, proved=False)
    assert refused([silent] * 5, every_s=30.0, asked_s=30.0) is None
    assert refused([silent] * 11, every_s=30.0, asked_s=30.0) is FailureReason.STALLED_PREFILL
