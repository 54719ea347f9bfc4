"""How a request ends with its engine, and whether that counts as its own failure. Pure."""

from typing import Final

from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason, Outcome
from workers.policy.lifecycle import EndRequests
from workers.requests.answer import Phase
from workers.requests.in_flight import InFlightRequest

SHORTLY_S: Final = 5.0  # from the end of a request to a death of its engine that it may have caused


def ending_of(running: InFlightRequest, action: EndRequests, *, owns_engine: bool) -> Outcome:
    """Return the outcome of a request whose engine is stopped, has died or is killed.

    No request can have brought down an engine that is not ours.
    """
    if action.reason is FailureReason.SHUTDOWN:
        return Cancelled(reason=CancelReason.SHUTDOWN)
    if action.suspects is None:  # the engine ended by itself, or was replaced
        is_suspect = action.brought_down and may_be_cause(running) and owns_engine
        is_outside = is_suspect and action.is_outside
        return EngineFailed(reason=action.reason, detail=action.because, brought_down=is_suspect, is_outside=is_outside)
    own = action.suspects.get(running.id)
    if own is None:
        detail = f"killed: {action.because}"
        return EngineFailed(reason=FailureReason.ENGINE_DIED, detail=detail, brought_down=False)
    return EngineFailed(reason=own, detail=action.because, brought_down=owns_engine)


def may_be_cause(running: InFlightRequest) -> bool:
    """Whether a request can be found to have brought its engine down: not while its tools run, with nothing on it."""
    return running.answer.phase is not Phase.TOOLS
