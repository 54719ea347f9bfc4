"""Callers: the key of each, its scopes, and its bounds on the engines.

Source: specification, "Keys".
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

API_KEYS: Final = "api_keys"  # the name of all keys without one


class KeyScope(StrEnum):
    """The purpose of a key."""

    READ = "read"  # read jobs and states
    SUBMIT = "submit"  # post jobs and requests, and end its own
    ADMIN = "admin"  # everything, including jobs of others


USUAL_SCOPES: Final = (KeyScope.READ, KeyScope.SUBMIT)  # the scopes of a key that sets none


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a key; rates are per second, and None means no bound.

    ``name`` is the key's name, None if no keys are configured. ``share`` is its part of the engines among waiting keys.
    ``queued`` bounds its waiting turns, ``max_priority`` the priority that it may give.
    """

    name: str | None
    scopes: frozenset[KeyScope]
    share: float = 1.0
    max_priority: int | None = None
    requests_per_s: float | None = None
    queued: int | None = None

    def may(self, scope: KeyScope) -> bool:
        """Whether it has a scope; ``admin`` includes every other one."""
        return scope in self.scopes or KeyScope.ADMIN in self.scopes

    @property
    def sees_all(self) -> bool:
        """Whether it may see work of other keys, or of none."""
        return KeyScope.ADMIN in self.scopes

    @property
    def owner(self) -> str | None:
        """The only key whose jobs it may see; None if it may see all."""
        return None if self.sees_all else self.name or ""

    def sees(self, owner: str | None) -> bool:
        """Whether it may see work of the key with that name; None stands for work without a key."""
        return self.sees_all or (owner is not None and owner == self.name)

    def own_key(self, key: str) -> str:
        """Return an idempotency key as stored: each named key has its own, and no header contains a line feed."""
        return key if self.name in {None, API_KEYS} else f"{self.name}\n{key}"


ANYBODY: Final = Caller(name=None, scopes=frozenset(KeyScope))  # a caller on this machine, if no keys are configured


def shares_of(callers: Iterable[Caller]) -> dict[str | None, float] | None:
    """Return the shares of named keys; None without any, when all callers wait in one queue."""
    shares = {caller.name: caller.share for caller in callers}
    return shares if shares.keys() - {None, API_KEYS} else None
