"""Whether a turn that its engine refused is tried again. Pure; deaths are judged by ``blame``."""

from dataclasses import replace
from typing import Final

from service.conversations.charges import Charges
from service.scheduling.core.blame.deaths import TurnRecord
from workers.outcome import EngineFailed, FailureReason

LEAST_REFUSALS: Final = 5  # of engines that answered others meanwhile
MOST_REFUSALS: Final = 10


def refuse(
    charges: Charges, failed: EngineFailed, now: float, *, refusal_s: float | None, record: TurnRecord
) -> tuple[Charges, FailureReason | None]:
    """Return the charges after one more refusal, and the reason to give up, if that was one too many.

    A refusal by an engine that was not seen to answer anybody else speaks against neither: the turn is asked again, for
    ``refusal_s`` from the first on. ``record`` is what is known of refusals by engines of the model: the more of them
    fall on turns that end well, the more it takes. ``now`` is in seconds since the epoch.
    """
    if failed.reason is FailureReason.ENGINE_DIED:
        return charges, None  # it was killed for another's silence
    since = now if charges.refused_at is None else charges.refused_at
    refused = replace(charges, refused_at=since, refusals=charges.refusals + failed.is_proved)
    if refused.refusals >= record.faults_to_convict(LEAST_REFUSALS, MOST_REFUSALS):
        return refused, failed.reason
    if refusal_s is not None and now - since >= refusal_s:
        return refused, FailureReason.ENGINE_REJECTED
    return refused, None
