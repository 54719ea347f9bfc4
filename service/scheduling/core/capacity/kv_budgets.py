"""What the KV cache of each worker has room for, and what turns in flight have reserved there, in tokens. Pure.

Source: specification, "Capacity in tokens".
"""

from service.conversations.job import TurnKey


class KvBudgets:
    """Written by the core alone; a worker without a budget is bounded by its slots alone."""

    def __init__(self) -> None:
        self._budgets: dict[str, int] = {}
        self._reserved: dict[str, dict[TurnKey, int]] = {}

    def __repr__(self) -> str:
        return f"<KvBudgets {[(worker, self.reserved(worker), total) for worker, total in self._budgets.items()]}>"

    def open(self, worker: str, tokens: int | None) -> None:
        """Take what a worker has room for; None is a worker whose slots bound it. What is reserved there stays."""
        if tokens is None:
            self._budgets.pop(worker, None)
        else:
            self._budgets[worker] = tokens

    def budget(self, worker: str) -> int | None:
        """Return what a worker has room for."""
        return self._budgets.get(worker)

    def reserved(self, worker: str) -> int:
        """Return what turns have reserved on a worker."""
        return sum(self._reserved.get(worker, {}).values())

    def fits(self, worker: str, tokens: int) -> bool:
        """Whether a turn has room on a worker. One alone always has: only the engine knows that it does not fit."""
        budget, taken = self._budgets.get(worker), self._reserved.get(worker)
        return budget is None or not taken or sum(taken.values()) + tokens <= budget

    def reserve(self, worker: str, key: TurnKey, tokens: int) -> None:
        """Keep room for a turn that starts on a worker."""
        self._reserved.setdefault(worker, {})[key] = tokens

    def release(self, worker: str, key: TurnKey) -> None:
        """Give up the room of a turn that has ended."""
        taken = self._reserved.get(worker, {})
        taken.pop(key, None)
        if not taken:
            self._reserved.pop(worker, None)
