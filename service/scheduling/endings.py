"""The verdict on the end of an attempt: the turn's next move, and its charges. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from service.conversations.job.states import TurnState
from service.conversations.record.transcript import Charges
from service.scheduling.core.blame import BlameVerdict, Trial
from service.scheduling.core.deaths import STALLED, TurnRecord, refuse
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed

WHY: Final[Mapping[CancelReason, str | None]] = {
    CancelReason.CONVERSATION_ENDED: None,
    CancelReason.SHUTDOWN: "Roundhouse was stopped",
    CancelReason.WEIGHTS: "its engine was given new weights, and ended what was in flight (mode: abort)",
    CancelReason.CACHE_FULL: "the KV cache had no room for it beside the others; the youngest gives way",
    CancelReason.SLOT_LOST: "it had lent its slot while its tools ran, and the engine is not there any more",
    CancelReason.STORE_LOST: "the store could not be read",
    CancelReason.LEASE_LOST: "it runs again: this node could not renew its lease",
    CancelReason.UPGRADE: "it goes on: Roundhouse is upgraded in place",
}
CANCELLED: Final[Mapping[CancelReason, FailureReason]] = {
    CancelReason.CONVERSATION_ENDED: FailureReason.CANCELLED,
    CancelReason.WEIGHTS: FailureReason.WEIGHTS_CHANGED,
    CancelReason.CACHE_FULL: FailureReason.CACHE_FULL,
    CancelReason.SLOT_LOST: FailureReason.SLOT_LOST,
}
# After these ends the engine may still work on the request, so they prove nothing about it.
UNPROVED: Final = frozenset({FailureReason.DEADLINE, FailureReason.INTERNAL})


class Proof(StrEnum):
    """The evidence that an end gives about the attempt's engine."""

    BORNE = "borne"  # the engine has outlived the attempt, which clears the turn
    DIED = "died"
    REFUSED = "refused"
    CUT_OFF = "cut_off"  # the engine may still work on the request, or has just dropped it


class Move(StrEnum):
    """The turn's next move."""

    COMPLETE = "complete"
    RUN_AGAIN = "run_again"
    FAIL = "fail"
    CUT_OFF = "cut_off"


class FailureEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence about an engine that has failed, and about its model.

    ``death`` is the verdict of blame if it died, ``deaths`` and ``refusals`` are the records of its model. ``asked_s``
    is the length of the attempt, ``refusal_s`` the time for which a worker may refuse. ``now`` is in seconds since the
    epoch.
    """

    death: BlameVerdict | None = None
    deaths: TurnRecord = TurnRecord()
    refusals: TurnRecord = TurnRecord()
    asked_s: float = 0.0
    refusal_s: float | None = None
    now: float = 0.0


class TurnVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The turn's next move and its charges; ``trial`` is set if it runs again as a suspect."""

    move: Move
    charges: Charges
    reason: FailureReason = FailureReason.CANCELLED  # also the reason of a turn that is cut off
    detail: str = ""
    trial: Trial | None = None


COMPLETED: Final = TurnVerdict(move=Move.COMPLETE, charges=Charges())


def proof_of(outcome: Outcome) -> Proof:
    """Return the evidence that an end gives about the engine."""
    match outcome:
        case Completed():
            return Proof.BORNE
        case RequestFailed():
            return Proof.CUT_OFF if outcome.reason in UNPROVED else Proof.BORNE
        case Cancelled():
            return Proof.CUT_OFF
        case EngineFailed():
            if outcome.brought_down:
                return Proof.DIED
            return Proof.CUT_OFF if outcome.reason in STALLED else Proof.REFUSED
        case _:
            assert_never(outcome)


def decide(outcome: Outcome, charges: Charges, evidence: FailureEvidence | None, *, may_run_again: bool) -> TurnVerdict:
    """Return the verdict on an end; the first row that matches decides.

    | | end | and | move | reason | charges |
    | --- | --- | --- | --- | --- | --- |
    | 1 | complete | | complete | | none |
    | 2 | cancelled, its conversation has ended | | cut off | | kept |
    | 3 | the request failed | the engine outlived it | fail | its own | none |
    | 4 | the request failed | | fail | its own | kept |
    | 5 | cancelled | | run again | that of the cancel | kept |
    | 6 | the engine died | blame convicts the turn | fail | poisoned | those of blame |
    | 7 | the engine died | | run again | its own | those of blame |
    | 8 | the engine refused | too often, or for too long | fail | that of the refusals | one more |
    | 9 | the engine refused | | run again | its own | one more |

    A turn that may not run again fails for the same reason instead. A suspect runs again on trial. ``evidence`` is
    set if the engine has failed.
    """
    match outcome:
        case Completed():
            return COMPLETED
        case Cancelled(reason=CancelReason.CONVERSATION_ENDED):
            return TurnVerdict(move=Move.CUT_OFF, charges=charges)
        case RequestFailed():
            # Ends by the service itself too: the engine has outlived the attempt.
            left = Charges() if proof_of(outcome) is Proof.BORNE else charges
            return TurnVerdict(move=Move.FAIL, charges=left, reason=outcome.reason, detail=outcome.detail)
        case Cancelled(reason=why):
            reason = CANCELLED.get(why, FailureReason.SHUTDOWN)
            verdict = TurnVerdict(move=Move.RUN_AGAIN, charges=charges, reason=reason, detail=WHY[why] or "")
        case EngineFailed():
            assert evidence is not None  # noqa: S101 - it is set if an engine has failed
            verdict = _judge_failure(outcome, charges, evidence)
        case _:
            assert_never(outcome)
    if verdict.move is Move.RUN_AGAIN and not may_run_again:
        return replace(verdict, move=Move.FAIL, trial=None)
    is_suspect = verdict.trial is None and verdict.charges.is_suspect
    return replace(verdict, trial=Trial.NEXT) if is_suspect and verdict.move is Move.RUN_AGAIN else verdict


def _judge_failure(failed: EngineFailed, charges: Charges, evidence: FailureEvidence) -> TurnVerdict:
    death = evidence.death
    if death is None:
        charges, reason = refuse(
            charges,
            failed,
            evidence.now,
            asked_s=evidence.asked_s,
            refusal_s=evidence.refusal_s,
            record=evidence.refusals,
        )
        move = Move.RUN_AGAIN if reason is None else Move.FAIL
        return TurnVerdict(move=move, charges=charges, reason=reason or failed.reason, detail=failed.detail)
    verdict = TurnVerdict(
        move=Move.RUN_AGAIN, charges=death.charges, reason=failed.reason, detail=failed.detail, trial=death.trial
    )
    if not death.is_convicted:
        return verdict
    detail = (
        f"{failed.detail}; {death.charges.deaths or death.charges.outside} engines died with this turn alone on them,"
        f" and by themselves they do so in at most {evidence.deaths.rate_bound:.1%} of turns"
    )
    return replace(verdict, move=Move.FAIL, reason=FailureReason.POISONED, detail=detail, trial=None)


def ending_of(outcome: Outcome) -> tuple[TurnState, str | None, str | None]:
    """Return the state, the reason and the detail of an attempt with this outcome."""
    match outcome:
        case Completed():
            return TurnState.COMPLETED, None, None
        case EngineFailed() | RequestFailed():
            return TurnState.FAILED, outcome.reason, outcome.detail
        case Cancelled():
            return TurnState.CANCELLED, CANCELLED.get(outcome.reason, FailureReason.SHUTDOWN), WHY[outcome.reason]
        case _:
            assert_never(outcome)
