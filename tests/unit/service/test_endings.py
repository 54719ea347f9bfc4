"""The table of ``endings.decide``: every kind of end has one verdict, for any state of the turn."""

from itertools import product
from typing import Final

import pytest

from service.conversations.record.transcript import Charges
from service.scheduling.core.blame import BlameVerdict, Trial
from service.scheduling.core.deaths import STALLED, TurnRecord
from service.scheduling.endings import (
    CANCELLED,
    UNPROVED,
    WHY,
    FailureEvidence,
    Move,
    Proof,
    TurnVerdict,
    decide,
    proof_of,
)
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed

CLEAN: Final = Charges()
SUSPECT: Final = Charges(is_suspect=True, deaths=1, refusals=2, service_ends=1)
ENOUGH: Final = Charges(refusals=20)
KNOWN: Final = TurnRecord(acquitted=1000)
DIED: Final = EngineFailed(reason=FailureReason.ENGINE_DIED, detail="it exited", brought_down=True)
REFUSED: Final = EngineFailed(reason=FailureReason.ENGINE_REJECTED, detail="500", brought_down=False, is_proved=True)
SILENT: Final = EngineFailed(reason=FailureReason.STALLED_DECODE, detail="silent", brought_down=False)
BOTH: Final = (True, False)


@pytest.mark.parametrize(("charges", "may_run_again"), [*product([CLEAN, SUSPECT], BOTH)])
def test_a_complete_answer_completes_the_turn_and_clears_it(charges: Charges, *, may_run_again: bool) -> None:
    """The engine survived the turn, so the turn is cleared of all charges."""
    verdict = decide(Completed(finish_reason="stop"), charges, None, may_run_again=may_run_again)
    assert verdict == TurnVerdict(move=Move.COMPLETE, charges=CLEAN)


@pytest.mark.parametrize(("reason", "charges", "may_run_again"), [*product(CancelReason, [CLEAN, SUSPECT], BOTH)])
def test_a_cancel_ends_the_turn_only_if_its_conversation_has_ended(
    reason: CancelReason, charges: Charges, *, may_run_again: bool
) -> None:
    """An end by the service itself proves nothing about the turn; a suspect stays one."""
    verdict = decide(Cancelled(reason=reason), charges, None, may_run_again=may_run_again)
    if reason is CancelReason.CONVERSATION_ENDED:
        assert verdict == TurnVerdict(move=Move.CUT_OFF, charges=charges)
        return
    assert verdict == TurnVerdict(
        move=Move.RUN_AGAIN if may_run_again else Move.FAIL,
        charges=charges,
        reason=CANCELLED.get(reason, FailureReason.SHUTDOWN),
        detail=WHY[reason] or "",
        trial=Trial.NEXT if charges.is_suspect and may_run_again else None,
    )


@pytest.mark.parametrize(("reason", "charges", "may_run_again"), [*product(FailureReason, [CLEAN, SUSPECT], BOTH)])
def test_a_request_that_cannot_succeed_fails_its_turn(
    reason: FailureReason, charges: Charges, *, may_run_again: bool
) -> None:
    """Its charges are dropped if the engine survived it, and stay while the engine may still work on it."""
    outcome = RequestFailed(reason=reason, detail="so it is")
    verdict = decide(outcome, charges, None, may_run_again=may_run_again)
    left = charges if reason in UNPROVED else CLEAN
    assert verdict == TurnVerdict(move=Move.FAIL, charges=left, reason=reason, detail="so it is")


@pytest.mark.parametrize(("trial", "may_run_again"), [*product([None, *Trial], BOTH)])
def test_a_turn_whose_engine_died_runs_again_as_blame_decides(trial: Trial | None, *, may_run_again: bool) -> None:
    """A suspect without a verdict is tried next. A turn that may not run again fails with the engine's end."""
    death = BlameVerdict(charges=SUSPECT, trial=trial)
    verdict = decide(DIED, CLEAN, FailureEvidence(death=death), may_run_again=may_run_again)
    assert verdict == TurnVerdict(
        move=Move.RUN_AGAIN if may_run_again else Move.FAIL,
        charges=SUSPECT,
        reason=FailureReason.ENGINE_DIED,
        detail="it exited",
        trial=(trial or Trial.NEXT) if may_run_again else None,
    )


@pytest.mark.parametrize(
    ("charges", "deaths"), [(Charges(is_suspect=True, deaths=2), 2), (Charges(is_suspect=True, outside=5), 5)]
)
@pytest.mark.parametrize("may_run_again", BOTH)
def test_a_convicted_turn_fails_with_the_reason(charges: Charges, deaths: int, *, may_run_again: bool) -> None:
    """The detail counts the engines that died, and gives the rate at which they die by themselves."""
    evidence = FailureEvidence(death=BlameVerdict(charges=charges, is_convicted=True), deaths=KNOWN)
    verdict = decide(DIED, SUSPECT, evidence, may_run_again=may_run_again)
    detail = (
        f"it exited; {deaths} engines died with this turn alone on them,"
        " and by themselves they do so in at most 0.3% of turns"
    )
    assert verdict == TurnVerdict(move=Move.FAIL, charges=charges, reason=FailureReason.POISONED, detail=detail)


@pytest.mark.parametrize(("charges", "may_run_again"), [*product([CLEAN, SUSPECT], BOTH)])
def test_a_refused_turn_runs_again_with_one_more_refusal(charges: Charges, *, may_run_again: bool) -> None:
    """Its other charges stay."""
    evidence = FailureEvidence(now=50.0, asked_s=1.0, refusals=KNOWN)
    verdict = decide(REFUSED, charges, evidence, may_run_again=may_run_again)
    assert verdict == TurnVerdict(
        move=Move.RUN_AGAIN if may_run_again else Move.FAIL,
        charges=Charges(
            is_suspect=charges.is_suspect,
            deaths=charges.deaths,
            service_ends=charges.service_ends,
            refusals=charges.refusals + 1,
            refused_at=50.0,
        ),
        reason=FailureReason.ENGINE_REJECTED,
        detail="500",
        trial=Trial.NEXT if charges.is_suspect and may_run_again else None,
    )


@pytest.mark.parametrize("may_run_again", BOTH)
@pytest.mark.parametrize(
    ("charges", "failed", "evidence", "reason"),
    [
        (ENOUGH, REFUSED, FailureEvidence(refusals=KNOWN), FailureReason.ENGINE_REJECTED),
        (Charges(stalls=9), SILENT, FailureEvidence(), FailureReason.STALLED_DECODE),
        (Charges(refused_at=0.0, refused_s=9.0), SILENT, FailureEvidence(refusal_s=9.0), FailureReason.STALLED_DECODE),
    ],
)
def test_a_turn_refused_too_often_or_for_too_long_fails(
    charges: Charges, failed: EngineFailed, evidence: FailureEvidence, reason: FailureReason, *, may_run_again: bool
) -> None:
    """It fails with the reason of its refusals, which are counted and timed over all attempts."""
    verdict = decide(failed, charges, evidence, may_run_again=may_run_again)
    assert (verdict.move, verdict.reason, verdict.detail, verdict.trial) == (Move.FAIL, reason, failed.detail, None)


ENDS: Final[dict[Proof, list[Outcome]]] = {
    Proof.BORNE: [
        Completed(finish_reason="stop"),
        *(RequestFailed(reason=reason, detail="") for reason in FailureReason if reason not in UNPROVED),
    ],
    Proof.CUT_OFF: [
        *(Cancelled(reason=reason) for reason in CancelReason),
        *(RequestFailed(reason=reason, detail="") for reason in UNPROVED),
        *(EngineFailed(reason=reason, detail="", brought_down=False) for reason in STALLED),
    ],
    Proof.DIED: [EngineFailed(reason=reason, detail="", brought_down=True) for reason in FailureReason],
    Proof.REFUSED: [
        EngineFailed(reason=reason, detail="", brought_down=False) for reason in FailureReason if reason not in STALLED
    ],
}


@pytest.mark.parametrize("proof", Proof)
def test_an_end_proves_one_thing_about_its_engine(proof: Proof) -> None:
    """Blame gets one call for each kind of end."""
    assert {proof_of(outcome) for outcome in ENDS[proof]} == {proof}
