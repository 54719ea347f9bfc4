"""Probes of an idle engine: its speed at reading and writing, and whether it still answers."""

from collections.abc import Callable
from typing import Final

from workers.engine.engine_owner import EngineOwner
from workers.health.evidence import Observations
from workers.health.probes import Calibration, ProbeResult, Probes
from workers.outcome import FailureReason
from workers.spec import EngineKind, WorkerSpec

PROBE_S: Final = 15.0  # between two probes

PROBES_REFUSED: Final = 3
LEAST_STEP: Final = 16  # tokens of an answer: fewer do not show the rate
MOST_WORDS: Final = 200  # words of a prompt
TOKENS_A_WORD: Final = 8  # at most: the prompt must fit
TIMES: Final = 2  # a single measurement may be of a cold cache


class IdleProbe:
    """Checks now and then whether an engine without work is ready; ``limit_s`` bounds its silence, None never does."""

    def __init__(
        self,
        probes: Probes,
        owner: EngineOwner,
        limit_s: float | None,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._probes = probes
        self._owner = owner
        self._limit_s = limit_s
        self._is_idle = is_idle
        self._clock = clock
        self.begin()

    def __repr__(self) -> str:
        return f"<IdleProbe refusals={self._refusals}>"

    def begin(self) -> None:
        """Start over with another engine."""
        self._refusals = 0
        self._silent_since: float | None = None
        self._due_at = self._clock() + PROBE_S

    def is_due(self, now: float) -> bool:
        """Return whether a probe of the engine is due, and schedule the next."""
        if now < self._due_at:
            return False
        self._due_at = now + PROBE_S
        return True

    async def run(self) -> None:
        """Probe once; have an engine replaced that refuses repeatedly or is silent too long."""
        result = await self._probes.probe()
        now = self._clock()
        if result is ProbeResult.ANSWERED or not self._is_idle():
            self._refusals, self._silent_since = 0, None
            return
        self._silent_since = now if self._silent_since is None else self._silent_since
        self._refusals = self._refusals + 1 if result is ProbeResult.REFUSED else 0
        is_hung = self._limit_s is not None and now - self._silent_since >= self._limit_s
        if self._refusals >= PROBES_REFUSED or is_hung:
            reason = FailureReason.ENGINE_UNREACHABLE
            because = f"{reason}: without work it has not answered for {now - self._silent_since:.0f} s"
            self._owner.break_engine(reason, because, {})


class EngineCalibration:
    """Measures each engine that starts on a lane, and one on a CPU without any measurement.

    Source: specification, "Latency model".
    """

    def __init__(self, spec: WorkerSpec, probes: Probes, observations: Observations) -> None:
        self._spec = spec
        self._probes = probes
        self._observations = observations

    def __repr__(self) -> str:
        return f"<EngineCalibration {self._spec.id} {self._observations.pace}>"

    async def run(self) -> None:
        """Measure, and warm up; each request is bounded, and an engine that does not answer serves all the same."""
        if self._spec.lane is not None:
            answer_tokens = max(LEAST_STEP, self._spec.max_tokens_per_step)
            measured = [await self._measure(answer_tokens)]
            while measured[-1] is not None and len(measured) < TIMES:
                measured.append(await self._measure(answer_tokens))
            if self._spec.warm_up:
                await self._probes.read_prompt(self._spec.warm_up, self._spec.warm_up_tools)
        elif self._is_unknown:
            await self._measure(1)

    @property
    def _is_unknown(self) -> bool:
        """Whether a first prompt may be slow and nothing was measured; vLLM's first one measures compilers."""
        is_slow = self._spec.on_cpu is True and self._spec.engine is not EngineKind.VLLM
        return is_slow and self._observations.pace.tokens_per_s is None

    async def _measure(self, answer_tokens: int) -> Calibration | None:
        words = min(MOST_WORDS, max(1, (self._spec.context - answer_tokens) // TOKENS_A_WORD))
        measured = await self._probes.calibrate(words, answer_tokens)
        if measured is None:
            return None
        pace = self._observations.pace.read(tokens=measured.tokens, seconds=measured.seconds)
        self._observations.pace = pace.wrote(tokens=measured.answer_tokens, seconds=measured.answer_s)
        return measured
