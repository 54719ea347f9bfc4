"""The measured pace of an engine at reading and writing, and the estimated duration of answers. Pure.

There is one measure: taken when an engine starts, and updated with every answer. It bounds the reading of a prompt
(``policy.liveness``) and predicts the duration of an answer, with which the real one is compared.

Source: specification, "Latency model".
"""

from math import ceil
from statistics import median
from typing import Final

import msgspec
from msgspec.structs import replace

FORGETTING: Final = 1 / 50  # share of the oldest knowledge lost per turn: agents' answers grow with their conversations
NEWEST: Final = 5  # prompts and answers that are remembered
LEAST_PROMPT: Final = 64  # in tokens: shorter prompts measure overhead more than the rate
LEAST_ANSWER: Final = 8  # in tokens
TOKENS_A_CHAR: Final = 0.5  # before the engine has reported any: high for English, right for code and CJK
MS: Final = 1000.0


class Mean:
    """A mean that is exact at first, and later favours recent values."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def __repr__(self) -> str:
        return f"<Mean {self.value:.3g} of {self.count}>"

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, FORGETTING)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A measure in milliseconds: the median, minimum and maximum of the newest values."""

    middle: float
    least: float
    most: float


class EnginePace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of one engine: prompt tokens per second, tokens per character of prompt, seconds per answer token."""

    rates: tuple[float, ...] = ()  # tokens per second, of the newest prompts
    tokens_a_char: float = TOKENS_A_CHAR
    steps_s: tuple[float, ...] = ()  # seconds per token, of the newest answers

    @property
    def tokens_per_s(self) -> float | None:
        """The median rate of the newest prompts; an outlier changes little."""
        return median(self.rates) if self.rates else None

    def learned(self, *, tokens: int, seconds: float, chars: int, prompt_tokens: int) -> "EnginePace":
        """Return the pace after one more prompt, of which ``tokens`` were computed and the rest came from a cache."""
        if not chars or prompt_tokens < LEAST_PROMPT:
            return self.read(tokens=tokens, seconds=seconds)
        return replace(self, tokens_a_char=prompt_tokens / chars).read(tokens=tokens, seconds=seconds)

    def read(self, *, tokens: int, seconds: float) -> "EnginePace":
        """Return the pace after one more piece of a prompt."""
        if tokens < LEAST_PROMPT or seconds <= 0:
            return self
        return replace(self, rates=(*self.rates, tokens / seconds)[-NEWEST:])

    def wrote(self, *, tokens: int, seconds: float) -> "EnginePace":
        """Return the pace after one more answer, with ``tokens`` after its first one."""
        if tokens < LEAST_ANSWER or seconds <= 0:
            return self
        return replace(self, steps_s=(*self.steps_s, seconds / tokens)[-NEWEST:])

    def seconds_for(self, tokens: float) -> float:
        """Return the estimated time for ``tokens`` of a prompt; 0 without a measurement."""
        return tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    @property
    def prefill_s(self) -> float | None:
        """The median time per prompt token."""
        return 1 / self.tokens_per_s if self.tokens_per_s else None

    @property
    def step_s(self) -> float | None:
        """The median time per answer token."""
        return median(self.steps_s) if self.steps_s else None

    @property
    def prefill_ms(self) -> Spread | None:
        """The time per prompt token; None without a measurement."""
        return _spread(tuple(MS / rate for rate in self.rates))

    def kernel_ms(self, quantum: int = 1) -> Spread | None:
        """The time of a step of ``quantum`` tokens of an answer; None without a measurement."""
        return _spread(tuple(MS * quantum * each for each in self.steps_s))


class AnswerWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of an answer: uncached prompt tokens, its own tokens, its tools, a swap before it."""

    fresh_tokens: int
    output_tokens: int
    tools_s: float = 0.0
    swap_s: float = 0.0


def latency_ms(pace: EnginePace, work: AnswerWork, quantum: int = 1) -> float | None:
    """Return the duration of an answer, without its wait for a slot; None if the engine's pace is not known.

    ``quantum`` is the number of tokens that one step writes.
    """
    prefill, kernel = pace.prefill_ms, pace.kernel_ms(quantum)
    if prefill is None or kernel is None:
        return None
    steps = ceil(work.output_tokens / quantum)
    return prefill.middle * work.fresh_tokens + steps * kernel.middle + MS * (work.tools_s + work.swap_s)


def _spread(values: tuple[float, ...]) -> Spread | None:
    return Spread(middle=median(values), least=min(values), most=max(values)) if values else None
