"""Whether an answer that breaks off goes on where it was. Pure."""

from enum import StrEnum


class Continuation(StrEnum):
    """The answer of the attempt after one that has broken off."""

    ON = "on"  # the next attempt goes on with its words
    OFF = "off"  # the next attempt starts over
    OVER_WEIGHTS = "over_weights"  # as on, and also with weights that have changed


def continuation_of(given: object) -> Continuation:
    """Return the setting for ``on``, ``off`` or ``{over_weights: true}``; YAML reads the first two as booleans.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(given, Continuation):
        return given
    known = {"on": Continuation.ON, "off": Continuation.OFF, True: Continuation.ON, False: Continuation.OFF}
    if isinstance(given, str | bool) and given in known:
        return known[given]
    if isinstance(given, dict) and given == {"over_weights": True}:
        return Continuation.OVER_WEIGHTS
    raise ValueError("must be on, off or {over_weights: true}")
