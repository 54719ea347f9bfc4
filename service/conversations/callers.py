"""Callers: the key of each, its scopes, and its bounds on the engines.

Source: specification, "Keys".
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

API_KEYS: Final = "api_keys"  # the name of all keys that have none


class KeyScope(StrEnum):
    """The purpose of a key."""

    READ = "read"  # looks
    SUBMIT = "submit"  # brings work, and ends its own
    ADMIN = "admin"  # everything, jobs of others included


USUAL_SCOPES: Final = (KeyScope.READ, KeyScope.SUBMIT)  # of a key for which none are told


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a key; the rates are of a second, None is without a bound.

    ``name`` is the key's, None where no keys are configured. ``share`` is its part of the engines among keys that wait.
    ``queued`` bounds its turns that wait, ``max_priority`` the priority that it may give.
    """

    name: str | None
    scopes: frozenset[KeyScope]
    share: float = 1.0
    max_priority: int | None = None
    requests_per_s: float | None = None
    queued: int | None = None

    def may(self, scope: KeyScope) -> bool:
        """Whether it has a scope; ``admin`` has every other one."""
        return scope in self.scopes or KeyScope.ADMIN in self.scopes

    @property
    def sees_all(self) -> bool:
        """Whether it may know of what belongs to others, or to nobody."""
        return KeyScope.ADMIN in self.scopes

    @property
    def owner(self) -> str | None:
        """The key whose jobs alone it may know of; None where it may know of all."""
        return None if self.sees_all else self.name or ""

    def sees(self, owner: str | None) -> bool:
        """Whether it may know of what belongs to the key of that name; None is what belongs to no key."""
        return self.sees_all or (owner is not None and owner == self.name)

    def own_key(self, key: str) -> str:
        """Return an idempotency key as it is stored: each named key has its own, and no header holds a line feed."""
        return key if self.name in {None, API_KEYS} else f"{self.name}\n{key}"


ANYBODY: Final = Caller(name=None, scopes=frozenset(KeyScope))  # of this machine, where no keys are configured


def shares_of(callers: Iterable[Caller]) -> dict[str | None, float] | None:
    """Return the shares of named keys; None without any, and everybody waits in one queue."""
    shares = {caller.name: caller.share for caller in callers}
    return shares if shares.keys() - {None, API_KEYS} else None
