"""The requests that are in flight on one worker, and the one way in which each of them ends."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from workers.generation import Generation
from workers.outcome import Outcome


class Flight:
    """One request in flight: what it has brought, the scope it runs in, and how it ended. The first ending stands."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.scope = anyio.CancelScope()
        self.ending: Outcome | None = None
        self.is_answered = False  # the engine has said its last word, and its silence means nothing

    def __repr__(self) -> str:
        """State how far it is."""
        return f"<Flight {self.generation!r} ending={self.ending!r}>"

    def end(self, outcome: Outcome) -> None:
        """End it from outside; what it does is cancelled."""
        if self.ending is None:
            self.ending = outcome
            self.scope.cancel()


class Flights:
    """All requests in flight on one worker."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()
        self._landed_tokens = 0
        self._counted_tokens = 0
        self._counted_at: float | None = None
        self.tokens_per_s = 0.0

    def __repr__(self) -> str:
        """State how many there are."""
        return f"<Flights {len(self._flights)}>"

    def __iter__(self) -> Iterator[Flight]:
        """Iterate over those that are in flight now; they may end meanwhile."""
        return iter(tuple(self._flights))

    @contextmanager
    def admit(self, generation: Generation) -> Iterator[Flight]:
        """Hold a request among those in flight for a block."""
        flight = Flight(generation)
        self._flights.add(flight)
        try:
            yield flight
        finally:
            self._flights.discard(flight)
            self._landed_tokens += generation.output_events

    def end_all(self, outcome: Outcome) -> None:
        """End every request in flight."""
        for flight in self:
            flight.end(outcome)

    def verdict(self) -> str | None:
        """Return what the requests do, in a word: the least advanced counts, None where there are none."""
        if not self._flights:
            return None
        waiting = any(flight.generation.first_token_at is None for flight in self._flights)
        return "prefilling" if waiting else "decoding"

    def measure_rate(self, now: float) -> None:
        """Update ``tokens_per_s`` with what came since the last call."""
        tokens = self._landed_tokens + sum(flight.generation.output_events for flight in self._flights)
        if self._counted_at is not None and now > self._counted_at:
            self.tokens_per_s = (tokens - self._counted_tokens) / (now - self._counted_at)
        self._counted_tokens, self._counted_at = tokens, now
