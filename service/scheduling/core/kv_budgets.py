"""The KV budget of each worker, and the reservations of turns in flight, in tokens. Pure.

Source: specification, "Capacity in tokens".
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from service.conversations.job.job import JobId, TurnKey

PrefixId = tuple[JobId, str]  # an agent of a job: the prompts of all its conversations begin alike


class KvNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The need of one turn, in tokens; turns of one ``prefix`` take its ``shared`` prompt tokens only once."""

    prompt: int
    answer: int
    shared: int = 0
    prefix: PrefixId | None = None

    @property
    def tokens(self) -> int:
        """All tokens of the turn if it is alone."""
        return self.prompt + self.answer


NOTHING: Final = KvNeed(prompt=0, answer=0)


class KvUse(msgspec.Struct, frozen=True, kw_only=True):
    """The present use of a turn in flight, in tokens: its prompt as counted by the engine, and its answer so far."""

    prompt: int
    answer: int


class _Reservations:
    """The reservations of one worker and their sum, in whole blocks; a prefix counts as far as it fills blocks."""

    def __init__(self, block: int) -> None:
        self.needs: dict[TurnKey, KvNeed] = {}
        self.tokens = 0
        self.block = block
        self._prefixes: dict[PrefixId, dict[TurnKey, int]] = {}

    def would_take(self, need: KvNeed) -> int:
        """Return the tokens that one more turn adds to the sum."""
        held = self._held(need.prefix)
        return self._own(need) + max(0, self._shared(need) - held)

    def add(self, key: TurnKey, need: KvNeed) -> None:
        self.needs[key] = need
        if need is NOTHING:  # the need of every turn when no worker has a budget
            return
        self.tokens += self.would_take(need)
        if need.prefix is not None:
            self._prefixes.setdefault(need.prefix, {})[key] = self._shared(need)

    def remove(self, key: TurnKey) -> None:
        need = self.needs.pop(key, None)
        if need is None or need is NOTHING:
            return
        before = self._held(need.prefix)
        if need.prefix is not None:
            sharers = self._prefixes[need.prefix]
            del sharers[key]
            if not sharers:
                del self._prefixes[need.prefix]
        self.tokens -= self._own(need) + before - self._held(need.prefix)

    def _shared(self, need: KvNeed) -> int:
        return need.shared - need.shared % self.block

    def _own(self, need: KvNeed) -> int:
        own = need.tokens - self._shared(need)
        return own + -own % self.block

    def _held(self, prefix: PrefixId | None) -> int:
        return max(self._prefixes.get(prefix, {}).values(), default=0) if prefix is not None else 0


class KvBudgets:
    """The KV budgets of all workers; written by the core alone. Without a budget only its slots bound a worker."""

    def __init__(self) -> None:
        self._budgets: dict[str, int] = {}
        self._blocks: dict[str, int] = {}
        self._reserved: dict[str, _Reservations] = {}

    def __repr__(self) -> str:
        return f"<KvBudgets {[(worker, self.reserved(worker), total) for worker, total in self._budgets.items()]}>"

    def open(self, worker: str, tokens: int | None, block: int = 1) -> None:
        """Set a worker's budget; None if its slots bound it. Its reservations stay.

        A new block size applies once no turn is on the worker.
        """
        self._blocks[worker] = block
        if tokens is None:
            self._budgets.pop(worker, None)
        else:
            self._budgets[worker] = tokens

    def budget(self, worker: str) -> int | None:
        """Return the KV budget of a worker, in tokens."""
        return self._budgets.get(worker)

    def reserved(self, worker: str) -> int:
        """Return the tokens that turns have reserved on a worker."""
        return self._reserved[worker].tokens if worker in self._reserved else 0

    def need_of(self, worker: str, key: TurnKey) -> KvNeed | None:
        """Return the reservation of a turn on a worker."""
        return self._reserved[worker].needs.get(key) if worker in self._reserved else None

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers on which turns have reserved anything."""
        return tuple(self._reserved)

    def needs(self, worker: str) -> Mapping[TurnKey, KvNeed]:
        """Return the reservation of each turn on a worker."""
        return MappingProxyType(self._reserved[worker].needs) if worker in self._reserved else {}

    def check(self) -> Iterator[str | None]:
        """Report each worker whose sum differs from its reservations."""
        for worker, reserved in self._reserved.items():
            if not reserved.needs:
                yield f"{worker}: nothing is reserved, and that is kept"
            expected = _Reservations(reserved.block)
            for key, need in reserved.needs.items():
                expected.add(key, need)
                yield None
            if expected.tokens != reserved.tokens:
                yield f"{worker}: {reserved.tokens} tokens are reserved, turns have reserved {expected.tokens}"

    def fits(self, worker: str, need: KvNeed) -> bool:
        """Whether a turn has room on a worker. A turn alone always has: only its engine can tell otherwise."""
        budget, taken = self._budgets.get(worker), self._reserved.get(worker)
        return budget is None or taken is None or taken.tokens + taken.would_take(need) <= budget

    def reserve(self, worker: str, key: TurnKey, need: KvNeed) -> None:
        """Reserve room for a turn on a worker; replaces its earlier reservation."""
        self.free_room(worker, key)
        if worker not in self._reserved:
            self._reserved[worker] = _Reservations(self._blocks.get(worker, 1))
        self._reserved[worker].add(key, need)

    def free_room(self, worker: str, key: TurnKey) -> None:
        """Release the room of a turn that has ended."""
        taken = self._reserved.get(worker)
        if taken is None:
            return
        taken.remove(key)
        if not taken.needs:
            del self._reserved[worker]
