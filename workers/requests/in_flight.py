"""The requests in flight on one worker; each ends in exactly one way."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from workers.log_context import concerns_now
from workers.notifier import Notifier
from workers.outcome import Outcome
from workers.policy.liveness import Judgement, Verdict
from workers.requests.answer import Answer
from workers.requests.request import RequestId


class InFlightRequest:
    """One request in flight: its answer, the scope it runs in, and its ending. The first ending stands."""

    def __init__(self, request_id: RequestId, job_name: str, answer: Answer) -> None:
        self.id = request_id
        self.job_name = job_name
        self.answer = answer
        self.scope = anyio.CancelScope()
        self.ending: Outcome | None = None
        self.concerns = concerns_now()  # for log lines about it that others write
        self.judgement = Judgement(verdict=Verdict.PREFILLING, silent_s=0.0, limit_s=None)  # the watch's last judgement
        self._left_s: float | None = None  # time left, while its clock stands still

    def __repr__(self) -> str:
        return f"<InFlightRequest {self.id} {self.job_name} {self.answer!r} ending={self.ending!r}>"

    def end(self, outcome: Outcome) -> None:
        """End it from outside and cancel its work."""
        if self.ending is None:
            self.ending = outcome
            self.scope.cancel()

    def come_to_end(self, outcome: Outcome) -> None:
        """End it from within: nothing is left to cancel."""
        if self.ending is None:
            self.ending = outcome

    def freeze(self) -> None:
        """Stop its clock: its engine is paused."""
        deadline = self.answer.deadline
        if deadline is not None and self._left_s is None:
            self._left_s = deadline.deadline - anyio.current_time()
            deadline.deadline = math.inf

    def thaw(self) -> None:
        """Let its clock run again."""
        if self.answer.deadline is not None and self._left_s is not None:
            self.answer.deadline.deadline = anyio.current_time() + self._left_s
        self._left_s = None


class InFlightRequests:
    """All requests in flight on one worker; ids count from 1 over the worker's life."""

    def __init__(self) -> None:
        self._in_flight: set[InFlightRequest] = set()
        self._last_id = 0
        self._landed_tokens = 0
        self._counted_tokens = 0
        self._counted_at: float | None = None
        self.tokens_per_s = 0.0
        self.left = Notifier()  # notified when a request has left

    def __repr__(self) -> str:
        return f"<InFlightRequests {len(self._in_flight)}>"

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._in_flight)

    def __iter__(self) -> Iterator[InFlightRequest]:
        """Iterate over the requests in flight now, in the order of arrival; they may end meanwhile."""
        return iter(sorted(self._in_flight, key=lambda running: running.id))

    def end_all(self, outcome: Outcome) -> None:
        """End every request from outside."""
        for running in self:
            running.end(outcome)

    def next_id(self) -> RequestId:
        """Return the id for another request."""
        self._last_id += 1
        return RequestId(self._last_id)

    @contextmanager
    def admit(self, running: InFlightRequest) -> Iterator[None]:
        """Hold a request among those in flight for a block."""
        self._in_flight.add(running)
        try:
            yield
        finally:
            self._in_flight.discard(running)
            self._landed_tokens += running.answer.output_tokens
            self.left.notify()

    @property
    def tokens(self) -> int:
        """The tokens of all answers so far, including those in flight."""
        return self._landed_tokens + sum(running.answer.output_tokens for running in self._in_flight)

    def measure_rate(self, now: float) -> None:
        """Update ``tokens_per_s`` from the tokens since the last call."""
        tokens = self.tokens
        if self._counted_at is not None and now > self._counted_at:
            self.tokens_per_s = (tokens - self._counted_tokens) / (now - self._counted_at)
        self._counted_tokens, self._counted_at = tokens, now
