"""Has workers read prompts beforehand: acts out what the core decides about idle slots, and says what was read.

Such a request is charged to nobody, kept nowhere and shown in no transcript. It is among the worker's requests in
flight: else its slot would look like one that works for no request, and the engine would be killed for that.
"""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import anyio

from service.conversations.job import JobId, TurnKey
from service.conversations.log_fields import of_turn
from service.scheduling.core.blame.blame import Blame
from service.scheduling.core.events import EndPreWarm, PreWarm, PreWarmEnded
from service.scheduling.prompts import JobPrompts
from service.scheduling.turn import constraint_of
from workers.fleet import Fleet
from workers.log_context import line_about
from workers.outcome import Cancelled, CancelReason
from workers.requests.answer import Answer
from workers.requests.in_flight import InFlightRequest
from workers.requests.request import CONSTRAINTS, Request
from workers.spec import Capacity, EngineKind, WorkerSpec
from workers.supervised import SupervisedWorker

LIMIT_S: Final = 60.0  # of one prompt: what was read by then stays in the cache
ENGINES: Final = frozenset({EngineKind.EMBEDDED, EngineKind.LLAMA_SERVER})  # in which it was measured
logger = logging.getLogger(__name__)


class RunningPreWarm:
    """One prompt that is read, or about to be."""

    def __init__(self, key: TurnKey, worker: SupervisedWorker, request: Request) -> None:
        self.key = key
        self.worker = worker
        self.request = request
        self.answer = Answer(time.monotonic)
        self._running: InFlightRequest = worker.prepare(request, self.answer, is_ahead=True)
        self._done = anyio.Event()

    def __repr__(self) -> str:
        return f"<RunningPreWarm {self.key} on {self.worker.spec.id}>"

    async def run(self) -> None:
        """Read it, for as long as it is wanted and within the limit."""
        try:
            with anyio.move_on_after(LIMIT_S):
                await self.worker.read_ahead(self.request, self.answer, self._running)
        finally:
            self._done.set()

    def end(self) -> None:
        """End it at once."""
        self._running.end(Cancelled(reason=CancelReason.CONVERSATION_ENDED))

    async def finish(self) -> None:
        """Return when its turn may ask: an engine that is cut off in the middle reads all of it again elsewhere."""
        try:
            await self._done.wait()
        finally:
            self.end()

    @property
    def ended(self) -> PreWarmEnded:
        """What was read, as the engine has told."""
        generation = self.answer.generation
        usage, progress = generation.usage, generation.prompt_progress
        cached = fresh = 0
        if usage is not None:
            cached, fresh = usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens
        elif progress is not None:
            cached, fresh = progress.cached, max(0, progress.processed - progress.cached)
        return PreWarmEnded(key=self.key, worker=self.worker.spec.id, cached_tokens=cached, fresh_tokens=fresh)


class Prewarmer:
    """Owned by ``JobTurns``; the scheduler's task group runs each prompt, and ``on_end`` takes what was read."""

    def __init__(
        self,
        jobs: Mapping[JobId, JobPrompts],
        fleet: Fleet,
        blame: Blame,
        on_end: Callable[[PreWarmEnded], None],
        *,
        is_wanted: bool,
    ) -> None:
        self._jobs = jobs
        self._fleet = fleet
        self._blame = blame
        self._on_end = on_end
        self._is_wanted = is_wanted
        self._running: dict[TurnKey, RunningPreWarm] = {}

    def __repr__(self) -> str:
        return f"<Prewarmer {len(self._running)}>"

    def may_read(self, spec: WorkerSpec) -> bool:
        """Whether a worker reads beforehand at all.

        Slots that share one cache do not: llama.cpp fails all requests when that is full.
        """
        return self._is_wanted and spec.engine in ENGINES and spec.capacity is Capacity.SLOTS and spec.lane is None

    def act(self, action: PreWarm | EndPreWarm, start_soon: Callable[..., None]) -> None:
        """Have a prompt read from now on, or end that at once unless it has ended at the same moment."""
        if isinstance(action, PreWarm):
            start_soon(self._run, self._begin(action))
            return
        running = self._running.pop(action.key, None)
        if running is not None:
            running.end()

    def _begin(self, action: PreWarm) -> RunningPreWarm:
        worker = self._fleet.get(action.worker)
        if worker is None:
            raise RuntimeError(f"{action} cannot be carried out")
        prompts, spec = self._jobs[action.key.job_id], worker.spec
        is_own = not CONSTRAINTS.isdisjoint(spec.params)
        constraint = None if is_own else constraint_of(prompts.agents[action.key.agent_id])
        is_told = constraint is not None and worker.constraints.plan(constraint).is_told
        request = prompts.request_ahead(action.key, datetime.now(UTC), spec, is_told=is_told)
        self._blame.note_company(spec.name, spec.id, worker.incarnation)
        running = self._running[action.key] = RunningPreWarm(action.key, worker, request)
        return running

    async def _run(self, prewarm: RunningPreWarm) -> None:
        try:
            await prewarm.run()
        except Exception:
            line = line_about(of_turn(prewarm.key, prewarm.worker.spec.id))
            logger.exception("turn %s: a defect of Roundhouse, as its prompt was read early", prewarm.key, extra=line)
        if self._running.get(prewarm.key) is prewarm:
            del self._running[prewarm.key]
        self._on_end(prewarm.ended)

    def end_all(self) -> None:
        """End all at once."""
        for running in self._running.values():
            running.end()
        self._running.clear()

    def take_over(self, key: TurnKey) -> RunningPreWarm | None:
        """Return what still reads the prompt of a turn that starts: it is the turn's from now on."""
        return self._running.pop(key, None)
