"""Where a scheduler's facts and conversations go: to its node's store, and to other nodes."""

import time
from collections.abc import Callable, Mapping, Sequence

from service.conversations.job import JobId, TurnKey
from service.node.followers import JobFollowers
from service.store import queries
from service.store.neighbours import Alone, Neighbours
from service.store.records import Record, StoredToolCall
from service.store.store import Store


class StoreOutlet:
    """Where a scheduler's facts and its conversations go: a ``service.scheduling.outlet.SchedulerStore``.

    ``listen`` is told of the facts as they are handed in; it must neither wait nor fail.
    """

    def __init__(
        self,
        store: Store,
        models: Sequence[str],
        lease_s: float,
        followers: JobFollowers,
        neighbours: Neighbours,
        listen: Callable[[Sequence[Record]], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._followers = followers
        self._neighbours = neighbours
        self._models = models
        self._lease_s = lease_s
        self._listen = listen
        self._missed_at: dict[str, float] = {}  # models that no other node had when it was asked for

    def __repr__(self) -> str:
        return f"<StoreOutlet to {self._store!r}>"

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Take facts that belong together, in order, and what to call when they are durable."""
        self._store.append_nowait(records, on_durable)
        self._listen(records)

    async def append(self, records: Sequence[Record]) -> bool:
        """Take facts, and return when they are durable; False if they were refused, as another node's by now."""
        return await self._store.append(records)

    async def calls_of(self, key: TurnKey) -> Sequence[StoredToolCall]:
        """Return the calls of tools that a turn has begun, in whatever attempt."""
        return await self._store.read(queries.tool_calls(key))

    def release_nowait(self, wants: Mapping[tuple[JobId, str], Sequence[str]]) -> None:
        """Leave conversations to other nodes, each with the models that it needs next."""
        self._store.release_nowait(wants)

    def is_followed(self, job_id: JobId) -> bool:
        """Whether anybody looks at a job while it runs."""
        return self._followers.is_followed(job_id)

    def is_elsewhere(self, model: str) -> bool:
        """Whether a model is for other nodes: one has it, or this one never will."""
        if isinstance(self._neighbours, Alone):
            return False
        if model not in self._models:
            return True
        if model in self._neighbours.models():
            self._missed_at.pop(model, None)
            return True
        # One that starts this moment is known a little later; only after a whole lease is no such node there.
        return time.monotonic() - self._missed_at.setdefault(model, time.monotonic()) < self._lease_s
