"""The trainer's end of a torch group: this process is rank 0, and every engine of the model has a rank."""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from roundhouse_client.trainer.tensors import SentTensor, buckets

_ABANDONED: Final[list[Any]] = []


class ProcessGroup:
    """One group after another: a listening store, and the group that meets in it."""

    def __init__(self) -> None:
        self._store: Any = None
        self._group: Any = None
        self._is_sending = False

    def __repr__(self) -> str:
        return f"<ProcessGroup made={self.is_made} sending={self._is_sending}>"

    @property
    def is_made(self) -> bool:
        """Whether there is a group here; only the service knows whether the others are still in it."""
        return self._group is not None

    def listen(self, address: str, port: int, timeout_s: float) -> int:
        """Open a store that listens at ``address``; return its port, a free one if ``port`` is 0."""
        from torch.distributed import TCPStore  # noqa: PLC0415 - only a broadcast needs torch

        self._store = TCPStore(address, port, None, True, timedelta(seconds=timeout_s), False)
        return int(self._store.port)

    def join(self, key: str, world_size: int, timeout_s: float) -> None:
        """Make the group with all engines that join in the store under ``key``.

        Raises:
            RuntimeError: not all engines joined in time.
        """
        from torch.distributed import PrefixStore, ProcessGroupGloo  # noqa: PLC0415 - as above

        store = PrefixStore(key, self._store)
        self._group = ProcessGroupGloo(store, 0, world_size, timedelta(seconds=timeout_s))

    def leave(self) -> None:
        """Drop the group; freeing one with a broadcast under way would block until its limit."""
        if self._is_sending:
            _ABANDONED.append(self._group)
        self._group = self._store = None
        self._is_sending = False

    def broadcast(self, sent: Sequence[SentTensor], in_flight: int, timeout_s: float) -> None:
        """Send tensors to all; at most ``in_flight`` broadcasts are under way at once.

        Raises:
            RuntimeError: a connection broke, or a time limit passed.
        """
        limit = timedelta(seconds=timeout_s)
        under_way: deque[Any] = deque()
        self._is_sending = True
        for bucket in buckets(sent):
            under_way.append(self._group.broadcast(bucket, 0))
            if len(under_way) >= in_flight:
                under_way.popleft().wait(limit)
        while under_way:
            under_way.popleft().wait(limit)
        self._is_sending = False
