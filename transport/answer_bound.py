"""The bound of an answer in tokens: one parameter with several names.

Source: specification, "Generation parameters".
"""

from collections.abc import Mapping
from typing import Final

MOST: Final = 2**62  # a larger number counts as no bound
NAMES: Final = ("max_tokens", "max_completion_tokens", "n_predict")
_NAMES: Final = frozenset(NAMES)


def bounds_in(params: Mapping[str, object]) -> dict[str, object]:
    """Return the bounds in parameters by name; null sets none."""
    if _NAMES.isdisjoint(params):  # most parameters have none, and each turn asks several times
        return {}
    return {name: value for name in NAMES if (value := params.get(name)) is not None}


def bound_of(params: Mapping[str, object]) -> int | None:
    """Return the widest bound in tokens that parameters set on an answer; None if none of them is a count."""
    if _NAMES.isdisjoint(params):
        return None
    return max(filter(None, map(_count, bounds_in(params).values())), default=None)


def laid_over(earlier: Mapping[str, object], later: Mapping[str, object]) -> dict[str, object]:
    """Return ``earlier`` overlaid with ``later``, name by name; a later bound replaces an earlier one of any name."""
    both = {**earlier, **later}
    if _NAMES.isdisjoint(both):
        return both
    given = bounds_in(later) or bounds_in(earlier)
    return {name: given.get(name, value) for name, value in both.items() if name in given or name not in NAMES}


def _count(value: object) -> int | None:
    """Return an integer of at least 1, which may be written 8.0; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value < MOST:
        return None
    return int(value) if value == int(value) else None
