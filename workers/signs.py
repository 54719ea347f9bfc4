"""What has been seen of one engine lately, beside its answers; each look adds to it."""

from collections.abc import Callable

from transport.counters import EngineCounters
from workers.answer import Phase
from workers.flight import Flight, Flights
from workers.incident import Evidence
from workers.policy.liveness import EngineSigns, PrefillPace, RequestSigns
from workers.vitals import KernelView, Vitals


class Signs:
    """Keeps when each thing was last seen to move; written by the watch alone."""

    def __init__(self, flights: Flights, vitals: Vitals, clock: Callable[[], float]) -> None:
        self._flights = flights
        self._vitals = vitals
        self._clock = clock
        self.pace = PrefillPace()
        self.forget()

    def __repr__(self) -> str:
        """State what is known."""
        return f"<Signs counters={self.counters} pace={self.pace}>"

    def forget(self) -> None:
        """Forget all that was of another incarnation; how fast it reads stays."""
        self.counters: EngineCounters | None = None
        self.kernel = KernelView()
        self._rose_at: float | None = None
        self._unexplained_at: float | None = None
        self._looked_at: float | None = None
        self._cpu_percent: float | None = None
        self._kernel_at: float | None = None
        self._log_bytes = self._vitals.log_bytes()
        self._log_grew_at: float | None = None

    async def look(self) -> None:
        """Ask the engine and the kernel once; each is bounded by itself."""
        view = await self._vitals.kernel_view()
        now = self._clock()
        if self._kernel_at is not None and now > self._kernel_at and self.kernel.processes:
            self._cpu_percent = 100 * (view.cpu_s - self.kernel.cpu_s) / (now - self._kernel_at)
        self.kernel, self._kernel_at = view, now
        log_bytes = self._vitals.log_bytes()
        if log_bytes != self._log_bytes:
            self._log_bytes, self._log_grew_at = log_bytes, now
        counters = await self._vitals.read_counters()  # last: a busy engine may hold the answer back for long
        if counters is not None:
            self._compare(counters)

    def of_engine(self, flight: Flight, *, is_serving: bool) -> EngineSigns:
        """Return what speaks for the engine as ``flight`` sees it."""
        others = [other for other in self._flights if other is not flight and other.answer.phase is Phase.ENGINE]
        reading = [other for other in others if other.answer.generation.first_token_at is None]
        return EngineSigns(
            is_serving=is_serving,
            rose_at=self._rose_at,
            unexplained_at=self._unexplained_at,
            others_at=max((_progress_at(other) for other in others), default=None),
            prefilling_at=max((_progress_at(other) for other in reading), default=None),
        )

    def of_request(self, flight: Flight) -> RequestSigns:
        """Return what speaks for one request."""
        generation = flight.answer.generation
        told = generation.prompt_progress
        left = told.total - told.processed if told else flight.answer.prompt_chars * self.pace.tokens_a_char
        return RequestSigns(
            has_token=generation.first_token_at is not None,
            progress_at=generation.last_progress_at,
            prefill_left_s=self.pace.seconds_for(max(0.0, left)),
        )

    def evidence(self, flight: Flight) -> Evidence:
        """Return all that a verdict on ``flight`` rests on."""
        now = self._clock()
        generation = flight.answer.generation
        told = generation.prompt_progress

        def ago(at: float | None) -> float | None:
            return None if at is None else round(max(0.0, now - at), 3)

        return Evidence(
            silent_s=ago(generation.last_progress_at) or 0.0,
            limit_s=None if flight.judgement.limit_s is None else round(flight.judgement.limit_s, 3),
            last_byte_s=None if generation.begun_at is None else ago(generation.last_byte_at),
            prompt_tokens_done=told.processed if told else None,
            prompt_tokens=told.total if told else None,
            output_tokens=flight.answer.output_events,
            counters=None if self.counters is None else str(self.counters),
            counters_rose_s=ago(self._rose_at),
            cpu_percent=None if self._cpu_percent is None else round(self._cpu_percent, 1),
            log_grew_s=ago(self._log_grew_at),
        )

    def learn(self, flight: Flight) -> None:
        """Learn how fast the engine reads from an answer that is complete."""
        generation = flight.answer.generation
        if generation.timings is not None and generation.usage is not None:
            self.pace = self.pace.learned(
                tokens=generation.timings.prompt_tokens,
                seconds=generation.timings.prompt_ms / 1000,
                chars=flight.answer.prompt_chars,
                prompt_tokens=generation.usage.prompt_tokens,
            )

    def _compare(self, counters: EngineCounters) -> None:
        now, before, before_at = self._clock(), self.counters, self._looked_at
        self.counters, self._looked_at = counters, now
        if before is None or before_at is None:
            return
        advanced = counters.advances_since(before)
        if advanced:
            self._rose_at = now
        if advanced > sum(_progress_at(flight) >= before_at for flight in self._flights):
            self._unexplained_at = now


def _progress_at(flight: Flight) -> float:
    """Return when the model last got further; the start of a request is no progress of the engine's."""
    generation = flight.answer.generation
    return generation.last_progress_at if generation.has_progressed else float("-inf")
