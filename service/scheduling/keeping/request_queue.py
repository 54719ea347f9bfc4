"""The requests at the door that wait or are on slots: bounds, places in the queue, and fair eviction."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from operator import itemgetter
from typing import Final

import msgspec

from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import JobId, TurnKey
from service.errors import QueueFull
from service.scheduling.keeping.request import RelayedRequest, RelayFailure
from workers.policy.pace import Mean

PLACES_S: Final = 1.0  # seconds after which places in the queue are counted again
QUEUE_FULL: Final = "queue_full"
MOST_AFTER_S: Final = 60


class QueueRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on the waiting requests, and on the bodies of all requests together.

    With ``holds_slots`` slots are held for the next requests of programs.
    """

    requests: int
    bytes: int
    holds_slots: bool = True


class RequestQueue:
    """The requests that have not ended, in order of arrival; written by ``RelayedRequests``."""

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self.by_job: dict[JobId, RelayedRequest] = {}
        self.on_slots: dict[TurnKey, RelayedRequest] = {}
        self.pace = Mean()  # seconds on slots of answered requests
        self._bytes = 0
        self._places: dict[JobId, int] = {}  # places in the queue, counted PLACES_S before ``_places_until``
        self._places_until = -math.inf

    def __repr__(self) -> str:
        return f"<RequestQueue waiting={self.waiting} on_slots={len(self.on_slots)}>"

    def add(self, request: RelayedRequest) -> None:
        """Add a new request."""
        self.by_job[request.key.job_id] = request
        self._bytes += len(request.posted.body)

    def remove(self, job_id: JobId) -> RelayedRequest:
        """Remove a request that is over."""
        request = self.by_job.pop(job_id)
        self._bytes -= len(request.posted.body)
        return request

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self.by_job) - len(self.on_slots)

    @property
    def oldest_ready_at(self) -> datetime | None:
        """When the oldest waiting request came."""
        return next((request.posted_at for request in self.by_job.values() if request.is_waiting), None)

    def place_in_queue(self, request: RelayedRequest) -> int | None:
        """Return a request's place among those that wait for its model, by priority and arrival.

        None if it does not wait. Places are counted at most once a second, since many requests ask for their own.
        """
        now = time.monotonic()
        if now >= self._places_until:
            self._places_until = now + PLACES_S
            counts: Counter[str] = Counter()
            self._places.clear()
            waiting = (each for each in self.by_job.values() if each.is_waiting)
            for each in sorted(waiting, key=lambda each: -each.posted.priority):
                counts[each.posted.model] += 1
                self._places[each.key.job_id] = counts[each.posted.model]
        return self._places.get(request.key.job_id) if request.is_waiting else None

    def waiting_of(self, owner: str) -> int:
        """Return the number of a key's requests that wait for a slot."""
        return sum(request.is_waiting for request in self.by_job.values() if request.posted.owner == owner)

    def make_room(self, posted: PostedRequest, slots: int) -> Iterator[tuple[RelayedRequest, RelayFailure]]:
        """Yield requests to withdraw until a new one has room; each must be withdrawn before the next is taken.

        The newest waiting request of the key with the most goes, so that each key has its share. ``slots`` are those of
        the model.

        Raises:
            QueueFull: that key is the newcomer's own.
        """
        if self.waiting >= self.rules.requests:
            yield self._newest(posted, lambda _: 1, f"{self.waiting} requests wait (server.queue)", slots)
        while self._bytes + len(posted.body) > self.rules.bytes:
            why = f"the bodies of requests hold {self._bytes} bytes (limits.queue_bytes)"
            yield self._newest(posted, lambda each: len(each.posted.body), why, slots)

    def _newest(
        self, posted: PostedRequest, size: Callable[[RelayedRequest], int], why: str, slots: int
    ) -> tuple[RelayedRequest, RelayFailure]:
        waiting = [each for each in self.by_job.values() if each.is_waiting]
        held: Counter[str | None] = Counter()
        for each in waiting:
            held[each.posted.owner] += size(each)
        after_s = self._after_s(slots)
        owner, most = max(held.items(), key=itemgetter(1), default=(posted.owner, 0))
        if held[posted.owner] >= most:
            raise QueueFull(why, after_s)
        newest = next(each for each in reversed(waiting) if each.posted.owner == owner)
        return newest, RelayFailure(reason=QUEUE_FULL, detail=f"{why}, most of it of this key", after_s=after_s)

    def _after_s(self, slots: int) -> int:
        """Return the seconds until there should be room, by the number of waiting requests and the pace so far."""
        return max(1, min(MOST_AFTER_S, math.ceil(self.pace.value * self.waiting / max(1, slots))))
