"""Requests that count tokens. An engine needs no slot for one, so none waits for a slot.

Source: specification, "Queue of requests".
"""

import secrets
from typing import Final

import anyio
from msgspec.structs import replace

from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import JobId
from service.errors import QueueFull
from service.scheduling.keeping.request import OVERLOADED, RelayedRequest, RelayFailure
from service.scheduling.keeping.requests import RelayedRequests
from workers.fleet import Fleet
from workers.outcome import Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.requests.relay import Relay
from workers.states import LEASABLE
from workers.supervised import SupervisedWorker

AT_ONCE: Final = 2  # counts per worker: llama-server has four threads beside its slots, and probes need one
LIMIT_S: Final = 30.0  # seconds for one count on its worker: a million tokens take seconds
ID_BYTES: Final = 8
AFTER_S: Final = 1  # seconds until a retry if too many wait: one count takes milliseconds


class TokenCounts:
    """Asks ready workers, past the queue, in the caller's task; as many may wait as in the queue."""

    def __init__(self, fleet: Fleet, requests: RelayedRequests) -> None:
        self._fleet = fleet
        self._requests = requests
        self._limiters: dict[str, anyio.CapacityLimiter] = {}  # by worker id, as many as the configuration has

    def __repr__(self) -> str:
        return f"<TokenCounts waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        """The number of counts that wait for their worker."""
        return sum(limiter.statistics().tasks_waiting for limiter in self._limiters.values())

    async def ask(self, posted: PostedRequest) -> RelayedRequest | None:
        """Return a finished request; None if no worker could be asked, so that it must wait in the queue.

        Raises:
            QueueFull: too many counts wait.
        """
        if self.waiting >= self._requests.queue.rules.requests:
            raise QueueFull(f"{self.waiting} requests wait to be counted (server.queue)", AFTER_S)
        request = RelayedRequest(JobId(f"count-{secrets.token_hex(ID_BYTES)}"), posted)
        ready = [each for each in self._fleet if each.spec.name == posted.model and each.now.state in LEASABLE]
        for worker in sorted(ready, key=self._load):
            async with self._limiter(worker):
                request.begin_attempt(worker)
                outcome = await worker.requests.count(_relay_of(request), request.attempt.answer)
            if _is_last_word(outcome, request):
                request.finish(_failure_of(outcome))
                return request
        return None

    def _load(self, worker: SupervisedWorker) -> int:
        seen = self._limiter(worker).statistics()
        return seen.borrowed_tokens + seen.tasks_waiting

    def _limiter(self, worker: SupervisedWorker) -> anyio.CapacityLimiter:
        return self._limiters.setdefault(worker.spec.id, anyio.CapacityLimiter(AT_ONCE))


def _relay_of(request: RelayedRequest) -> Relay:
    limit_s = min(LIMIT_S, request.posted.limit_s or LIMIT_S)
    return replace(
        request.asked.to_relay(request.attempt), is_streamed=False, limit_s=limit_s, cache_owner=None, most_tokens=None
    )


def _is_last_word(outcome: Outcome, request: RelayedRequest) -> bool:
    """Whether no other engine is asked: this one has answered, or reported that it cannot count."""
    if isinstance(outcome, EngineFailed):
        return request.asked.whole is not None and request.asked.whole.status not in OVERLOADED
    return True


def _failure_of(outcome: Outcome) -> RelayFailure | None:
    match outcome:
        case Completed():
            return None
        case RequestFailed():
            return RelayFailure(reason=outcome.reason, detail=outcome.detail)
        case EngineFailed():  # its own words are passed on
            return RelayFailure(reason=FailureReason.ENGINE_REJECTED, detail=outcome.detail)
        case _:
            return RelayFailure(reason=FailureReason.INTERNAL, detail=f"a count ended with {outcome}")
