"""Recent observations of one engine, beside its answers; each look adds to them."""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from transport.counters import EngineCounters
from workers.health.incident import Evidence
from workers.health.probes import KernelView, Probes
from workers.policy.leaked_slots import SlotTasks
from workers.policy.liveness import BUSY_CORES, EngineObservations, RequestObservations
from workers.policy.pace import EnginePace
from workers.requests.answer import Phase
from workers.requests.in_flight import InFlightRequest, InFlightRequests
from workers.requests.request import RequestId

POLL_S: Final = 2.0  # between two looks at a silent engine
LEAST_INTERVAL_S: Final = 0.9  # between two looks at /proc, whose clock ticks a hundred times a second
GAP_S: Final = 3 * POLL_S  # a longer gap between looks: the time of a rise since the last one is unknown
_NEVER: Final = float("-inf")


class _Newest(Struct, frozen=True, kw_only=True):
    """The request with the newest progress, and the newest progress of all others."""

    running: InFlightRequest | None = None
    at: float = _NEVER
    others_at: float = _NEVER

    def joined_by(self, running: InFlightRequest, at: float) -> "_Newest":
        if at > self.at:
            return _Newest(running=running, at=at, others_at=self.at)
        return _Newest(running=self.running, at=self.at, others_at=at) if at > self.others_at else self

    def beside(self, running: InFlightRequest) -> float | None:
        at = self.others_at if running is self.running else self.at
        return None if at == _NEVER else at


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """The state of the engine at one moment, shared by all requests: each sees the others' progress in it."""

    rose_at: float | None
    unexplained_at: float | None
    progress: _Newest
    prefilling: _Newest
    batch_busy_at: float | None = None
    answered_at: float | None = None  # last answer of an ended request, if the server may hold requests back

    def as_seen_by(self, running: InFlightRequest, *, is_serving: bool) -> EngineObservations:
        """Return the engine's signs of life as evidence for ``running``."""
        return EngineObservations(
            is_serving=is_serving,
            rose_at=self.rose_at,
            unexplained_at=self.unexplained_at,
            others_at=self.progress.beside(running),
            prefilling_at=self.prefilling.beside(running),
            batch_busy_at=self.batch_busy_at,
            answering_at=self._answering_at(running),
        )

    def _answering_at(self, running: InFlightRequest) -> float | None:
        if self.answered_at is None:
            return None
        beside = self.progress.beside(running)
        return self.answered_at if beside is None else max(self.answered_at, beside)


class Observations:
    """Keeps when each thing was last seen to move; written only by the watch."""

    def __init__(
        self, in_flight: InFlightRequests, probes: Probes, clock: Callable[[], float], *, may_queue: bool = False
    ) -> None:
        self._in_flight = in_flight
        self._may_queue = may_queue  # the server may silently hold requests back
        self._probes = probes
        self._clock = clock
        self.pace = EnginePace()
        self.reset()

    def __repr__(self) -> str:
        return f"<Observations counters={self.counters} pace={self.pace}>"

    def reset(self) -> None:
        """Forget all observations of another incarnation; its reading speed stays."""
        self.counters: EngineCounters | None = None
        self.kernel = KernelView()
        self._rose_at: float | None = None
        self._unexplained_at: float | None = None
        self._compiled_at: float | None = None
        self._tasks: SlotTasks | None = None  # kept for an engine of ours that reports tasks
        self._first_looks: dict[RequestId, float] = {}
        self._looked_at: float | None = None
        self._tried_at: float | None = None
        self._cpu_percent: float | None = None
        self._kernel_at: float | None = None
        self._ticks = KernelView()
        self._ticks_at: float | None = None
        self.busy_at: float | None = None  # when its processes were last seen to compute
        self._answered_at = _NEVER
        self._batches: dict[RequestId, tuple[int, float]] = {}  # progress of each prompt, and the time it took
        self._log_bytes = self._probes.log_bytes()
        self._log_grew_at: float | None = None

    def poll_kernel_nowait(self) -> None:
        """Ask the kernel at once, if an engine is about to be killed and was not looked at."""
        if self._kernel_at is None or self._clock() - self._kernel_at > POLL_S:
            self.kernel, self._kernel_at = self._probes.kernel_view_nowait(), self._clock()

    async def poll(self) -> EngineCounters | None:
        """Ask the engine and the kernel once, each with its own limit; return the engine's counters."""
        if self._tried_at is None or self._clock() - self._tried_at > GAP_S:
            self.counters = None
        await self.poll_kernel()
        now = self._clock()
        log_bytes = self._probes.log_bytes()
        if log_bytes != self._log_bytes:
            self._log_bytes, self._log_grew_at = log_bytes, now
        counters = await self._probes.read_counters()  # last: a busy engine may hold the answer back for long
        self._tried_at = self._clock()
        if counters is not None:
            self._compare(counters)
        return counters

    async def poll_kernel(self) -> None:
        """Ask only the kernel, which always answers."""
        view = await self._probes.kernel_view()
        now = self._clock()
        self._measure_cpu(view, now)
        if self._kernel_at is not None and view.compiles_since(self.kernel):
            self._rose_at = self._unexplained_at = self._compiled_at = (
                now  # it makes kernels for these requests, before any step
            )
        self.kernel, self._kernel_at = view, now

    def _measure_cpu(self, view: KernelView, now: float) -> None:
        """Measure the CPU use of the tree; an interval of a few ticks would be too coarse."""
        if self._ticks_at is None or not self._ticks.processes:
            self._ticks, self._ticks_at = view, now
            return
        seconds = now - self._ticks_at
        if seconds < LEAST_INTERVAL_S:
            return
        cores = view.cpu_since(self._ticks) / seconds
        self._cpu_percent = 100 * cores
        if cores >= BUSY_CORES:
            self.busy_at = now
        self._ticks, self._ticks_at = view, now

    def learn_batches(self, running: InFlightRequest) -> None:
        """Learn the engine's reading speed from each batch that it reports, however the request ends."""
        progress = running.answer.generation.prompt_progress
        seen, seen_ms = self._batches.get(running.id, (0, 0.0))
        if progress is None or progress.processed <= max(seen, progress.cached):
            return
        since = max(seen, progress.cached)
        self.pace = self.pace.read(tokens=progress.processed - since, seconds=(progress.elapsed_ms - seen_ms) / 1000)
        self._batches[running.id] = progress.processed, progress.elapsed_ms

    def note_end(self, running: InFlightRequest) -> None:
        """Record the end of a request."""
        self._batches.pop(running.id, None)
        self._first_looks.pop(running.id, None)
        self._answered_at = max(self._answered_at, _progress_at(running))

    def snapshot(self, *, may_batch: bool = False) -> EngineSnapshot:
        """Return the engine's signs of life; ``may_batch``: it may be reading for a request that has left.

        It may also be reading a batch if a prompt was sent and no token of its answer has come.
        """
        progress = prefilling = _Newest()
        for running in self._in_flight:
            if running.answer.phase is Phase.ENGINE:
                at = _progress_at(running)
                progress = progress.joined_by(running, at)
                if running.answer.generation.first_token_at is None:
                    may_batch = True
                    prefilling = prefilling.joined_by(running, at)
        return EngineSnapshot(
            rose_at=self._rose_at,
            unexplained_at=self._unexplained_at,
            progress=progress,
            prefilling=prefilling,
            batch_busy_at=self.busy_at if may_batch else None,
            answered_at=self._answered_at if self._may_queue else None,
        )

    def of_request(self, running: InFlightRequest) -> RequestObservations:
        """Return one request's signs of life."""
        generation = running.answer.generation
        progress = generation.prompt_progress
        left = (
            progress.total - progress.processed if progress else running.answer.prompt_chars * self.pace.tokens_a_char
        )
        return RequestObservations(
            is_mute=running.answer.is_mute,
            has_token=generation.first_token_at is not None,
            progress_at=generation.last_progress_at,
            has_begun=generation.has_progressed,
            is_passed_over=self._is_passed_over(running),
            prefill_left_s=self.pace.seconds_for(max(0.0, left)),
        )

    def _is_passed_over(self, running: InFlightRequest) -> bool:
        """Whether the engine reports its tasks, and none that progresses can be this request's."""
        first_look, limit_s = self._first_looks.get(running.id), running.judgement.limit_s
        if self._tasks is None or first_look is None or limit_s is None:
            return False
        generation, now = running.answer.generation, self._clock()
        until = max(first_look, generation.last_progress_at + limit_s)
        advanced_at = self._tasks.newest_advance(generation.started_at, until)
        return not any(at is not None and now - at < limit_s for at in (advanced_at, self._compiled_at))

    def evidence(self, running: InFlightRequest) -> Evidence:
        """Return all evidence for a verdict on ``running``."""
        now = self._clock()
        generation = running.answer.generation
        progress = generation.prompt_progress

        def ago(at: float | None) -> float | None:
            return None if at is None else round(max(0.0, now - at), 3)

        return Evidence(
            silent_s=ago(generation.last_progress_at) or 0.0,
            limit_s=None if running.judgement.limit_s is None else round(running.judgement.limit_s, 3),
            last_byte_s=None if generation.begun_at is None else ago(generation.last_byte_at),
            prompt_tokens_done=progress.processed if progress else None,
            prompt_tokens=progress.total if progress else None,
            output_tokens=running.answer.output_tokens,
            counters=None if self.counters is None else str(self.counters),
            counters_rose_s=ago(self._rose_at),
            cpu_percent=None if self._cpu_percent is None else round(self._cpu_percent, 1),
            log_grew_s=ago(self._log_grew_at),
        )

    def learn(self, running: InFlightRequest) -> None:
        """Learn the engine's reading and writing speed from a complete answer."""
        generation = running.answer.generation
        first_at = generation.first_token_at
        if generation.usage is not None and first_at is not None:
            seen_s, timings, usage = first_at - generation.started_at, generation.timings, generation.usage
            # At most the time that we saw: an engine's clock goes on while the machine sleeps.
            self.pace = self.pace.learned(
                tokens=timings.prompt_tokens if timings else usage.prompt_tokens - usage.cached_tokens,
                seconds=min(timings.prompt_ms / 1000, seen_s) if timings else seen_s,
                chars=running.answer.prompt_chars,
                prompt_tokens=usage.prompt_tokens,
            )
            self.pace = self.pace.wrote(
                tokens=usage.completion_tokens - 1, seconds=generation.last_progress_at - first_at
            )

    def _compare(self, counters: EngineCounters) -> None:
        now, before, before_at = self._clock(), self.counters, self._looked_at
        self.counters, self._looked_at = counters, now
        if counters.running is None and not self._may_queue:
            self._tasks = self._tasks or SlotTasks()
            self._tasks.observe_slots(counters, now)
            self._first_looks |= {running.id: now for running in self._in_flight if running.id not in self._first_looks}
        if before is None or before_at is None:
            return
        advanced = counters.advances_since(before)
        if advanced:
            self._rose_at = now
        if advanced > sum(_progress_at(running) >= before_at for running in self._in_flight):
            self._unexplained_at = now


def _progress_at(running: InFlightRequest) -> float:
    """Return when the model last progressed; the start of a request is no progress of the engine's."""
    generation = running.answer.generation
    return generation.last_progress_at if generation.has_progressed else _NEVER
