"""The base of all values."""

from collections.abc import Mapping
from typing import Any


class Value:
    """A value of an answer; ``document`` is its original JSON, including fields of newer versions.

    States and reasons are plain words: a newer service may have more. The service uses the same values, without a
    ``document``.
    """

    __slots__ = ("document",)

    document: Mapping[str, Any]

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the document in copies and pickles."""
        slots = {name: getattr(self, name) for name in _slots(type(self)) if hasattr(self, name)}
        return _restored, (type(self), slots)


def _slots(kind: type) -> list[str]:
    return [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]


def _restored(kind: type[Value], slots: Mapping[str, Any]) -> Value:
    value = object.__new__(kind)
    for name, held in slots.items():
        object.__setattr__(value, name, held)
    return value
