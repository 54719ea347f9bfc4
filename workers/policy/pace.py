"""The measured pace of an engine at reading and writing, and the length of answers by it. Pure.

One truth: what is measured when an engine starts, and learned from every answer later, bounds how long a prompt may be
read (``policy.liveness``), predicts what an answer takes, and is what that is compared with.

Source: specification, "Latency model".
"""

from math import ceil
from statistics import median
from typing import Final

import msgspec
from msgspec.structs import replace

FORGETTING: Final = 1 / 50  # of the oldest knowledge with each turn: agents' answers grow with their conversations
NEWEST: Final = 5  # prompts and answers that are remembered
LEAST_PROMPT: Final = 64  # tokens: shorter prompts tell more of overheads than of the rate
LEAST_ANSWER: Final = 8  # tokens
TOKENS_A_CHAR: Final = 0.5  # until the engine has told: high for English, right for code and CJK
MS: Final = 1000.0


class Mean:
    """A mean that is exact at first, and then forgets."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def __repr__(self) -> str:
        return f"<Mean {self.value:.3g} of {self.count}>"

    def add(self, value: float) -> None:
        """Take one more."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, FORGETTING)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A measure in milliseconds: the middle of the newest, the least and the most of them."""

    middle: float
    least: float
    most: float


class EnginePace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of one engine: tokens of prompts a second, tokens a character of prompt, seconds an answer's token."""

    rates: tuple[float, ...] = ()  # tokens a second, of the newest prompts
    tokens_a_char: float = TOKENS_A_CHAR
    steps_s: tuple[float, ...] = ()  # seconds a token, of the newest answers

    @property
    def tokens_per_s(self) -> float | None:
        """The rate that half of the newest prompts were read faster than; one that is far off changes little."""
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
        """Return the pace after one more answer of which so many tokens came after the first one."""
        if tokens < LEAST_ANSWER or seconds <= 0:
            return self
        return replace(self, steps_s=(*self.steps_s, seconds / tokens)[-NEWEST:])

    def seconds_for(self, tokens: float) -> float:
        """Return how long so many tokens of a prompt should take; 0 where nothing was measured."""
        return tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    @property
    def prefill_s(self) -> float | None:
        """The median time of a token of a prompt."""
        return 1 / self.tokens_per_s if self.tokens_per_s else None

    @property
    def step_s(self) -> float | None:
        """The median time of a token of an answer."""
        return median(self.steps_s) if self.steps_s else None

    @property
    def prefill_ms(self) -> Spread | None:
        """The time of a token of a prompt; None where nothing was measured."""
        return _spread(tuple(MS / rate for rate in self.rates))

    def kernel_ms(self, quantum: int = 1) -> Spread | None:
        """The time of a step of ``quantum`` tokens of an answer; None where nothing was measured."""
        return _spread(tuple(MS * quantum * each for each in self.steps_s))


class AnswerWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of an answer: tokens of its prompt that no cache holds, its own tokens, its tools, a swap before it."""

    fresh_tokens: int
    output_tokens: int
    tools_s: float = 0.0
    swap_s: float = 0.0


def latency_ms(pace: EnginePace, work: AnswerWork, quantum: int = 1) -> float | None:
    """Return how long an answer takes, its wait for a slot apart; None where the engine's pace is not known.

    ``quantum`` is how many tokens of an answer one step writes.
    """
    prefill, kernel = pace.prefill_ms, pace.kernel_ms(quantum)
    if prefill is None or kernel is None:
        return None
    steps = ceil(work.output_tokens / quantum)
    return prefill.middle * work.fresh_tokens + steps * kernel.middle + MS * (work.tools_s + work.swap_s)


def _spread(values: tuple[float, ...]) -> Spread | None:
    return Spread(middle=median(values), least=min(values), most=max(values)) if values else None
