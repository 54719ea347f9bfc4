"""Whether a turn that its engine refused is tried again. Pure; deaths are judged by ``blame``."""

from dataclasses import replace
from typing import Final

from service.conversations.charges import Charges
from service.scheduling.core.blame.deaths import TurnRecord
from workers.outcome import EngineFailed, FailureReason

LEAST_REFUSALS: Final = 5  # of engines that answered others meanwhile
MOST_REFUSALS: Final = 10
MOST_STALLS: Final = 5  # while the engine answered a canary, or another turn
PAUSE_S: Final = 30.0  # between two attempts, at most: while nobody asks, nobody is refused
STALLED: Final = frozenset({FailureReason.STALLED_PREFILL, FailureReason.STALLED_DECODE})


def refuse(
    charges: Charges,
    failed: EngineFailed,
    now: float,
    *,
    asked_s: float,
    refusal_s: float | None,
    record: TurnRecord,
) -> tuple[Charges, FailureReason | None]:
    """Return the charges after one more refusal, and the reason to give up, if that was one too many.

    A refusal by an engine that was not seen to answer anybody else speaks against neither: the turn is asked again, for
    ``refusal_s`` in all from the first on. ``asked_s`` is how long this attempt has asked. ``record`` is what is known
    of refusals by engines of the model: the more of them fall on turns that end well, the more it takes. ``now`` is in
    seconds since the epoch.
    """
    if failed.reason is FailureReason.ENGINE_DIED:
        return charges, None  # it was killed for another's silence
    is_stall = failed.reason in STALLED
    refused = replace(
        charges,
        refused_at=now,
        refused_s=charges.refused_s + _refused_s(charges, now, asked_s),
        refusals=charges.refusals + (failed.is_proved and not is_stall),
        stalls=charges.stalls + (failed.is_proved and is_stall),
    )
    if refused.stalls >= MOST_STALLS or refused.refusals >= record.faults_to_convict(LEAST_REFUSALS, MOST_REFUSALS):
        return refused, failed.reason
    if refusal_s is not None and refused.refused_s >= refusal_s:
        return refused, failed.reason if is_stall else FailureReason.ENGINE_REJECTED
    return refused, None


def _refused_s(charges: Charges, now: float, asked_s: float) -> float:
    """Return what an attempt adds to the time of refusals: itself, and the pause before it; nothing the first time."""
    if charges.refused_at is None:
        return 0.0
    return asked_s + min(max(0.0, now - asked_s - charges.refused_at), PAUSE_S)
