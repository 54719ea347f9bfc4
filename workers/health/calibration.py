"""What an engine is asked before its first request: how fast it is, and to read what stands first in every prompt."""

from typing import Final

from workers.health.evidence import Observations
from workers.health.probes import Calibration, Probes
from workers.spec import EngineKind, WorkerSpec

LEAST_STEP: Final = 16  # tokens of an answer: fewer tell nothing of the rate
MOST_WORDS: Final = 200  # of a prompt
TOKENS_A_WORD: Final = 8  # at most: the prompt has to fit
TIMES: Final = 2  # what one measurement alone tells may be of a cold cache


class EngineCalibration:
    """Measures each engine that starts on a lane, and one on a CPU of which nothing is known.

    Source: specification, "Latency model".
    """

    def __init__(self, spec: WorkerSpec, probes: Probes, observations: Observations) -> None:
        self._spec = spec
        self._probes = probes
        self._observations = observations

    def __repr__(self) -> str:
        return f"<EngineCalibration {self._spec.id} {self._observations.pace}>"

    async def run(self) -> None:
        """Measure, and warm up; each question is bounded, and no answer is no reason not to serve."""
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
        """Whether a first prompt may take long, and nothing has told how long; vLLM's first one tells of compilers."""
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
