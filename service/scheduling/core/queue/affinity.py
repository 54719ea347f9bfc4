"""The wait for a worker whose cache holds a turn's prompt while another worker has a free slot. Pure.

The other worker would have to read the whole prompt again. A turn waits while that would take longer than the wait, and
never longer than it would take. At worst the turn is twice as late as if it had started elsewhere at once.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from service.conversations.job.job import TurnKey
from service.scheduling.core.queue.ready_queue import ReadyTurn
from workers.policy.pace import Mean

LEAST_TOKENS: Final = 512  # prompt tokens read; the time of fewer tells little about reading
LEAST_RATE: Final = 1.0  # tokens per second until a model's rate is known
LEAST_ANSWER: Final = 8  # answer tokens; the time of fewer tells nothing


class PromptReading(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's reading of a prompt: the tokens not in its cache, and the seconds to the first token of the answer.

    ``context_tokens`` is what its cache holds after the turn, prompt and answer. ``answer_tokens`` is the answer alone,
    which took ``answer_s`` from its first token to its last.
    """

    fresh_tokens: int
    seconds: float
    context_tokens: int
    answer_tokens: int = 0
    answer_s: float = 0.0


class CacheLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The last worker of a conversation's agent or of a client's program, and the tokens in its cache."""

    worker: str
    tokens: int = 0


class SpeedEstimates:
    """The reading and writing speed of each model's engines, and the length of its turns, in seconds."""

    def __init__(self) -> None:
        self._by_token: dict[str, Mean] = {}
        self._by_turn: dict[str, Mean] = {}
        self._by_answer_token: dict[str, Mean] = {}
        self._by_second: dict[str, Mean] = {}

    def __repr__(self) -> str:
        return f"<SpeedEstimates models={len(self._by_turn)}>"

    def learn(self, model: str, turn_s: float, reading: PromptReading | None) -> None:
        """Learn from the reading of one turn."""
        self._by_turn.setdefault(model, Mean()).add(turn_s)
        if reading is not None and reading.fresh_tokens >= LEAST_TOKENS:
            self._by_token.setdefault(model, Mean()).add(reading.seconds / reading.fresh_tokens)
        if reading is not None and reading.answer_tokens >= LEAST_ANSWER and reading.answer_s > 0:
            seconds = reading.answer_s / (reading.answer_tokens - 1)
            self._by_answer_token.setdefault(model, Mean()).add(seconds)

    def note_pace(self, model: str, read_s: float) -> None:
        """Set a model's time per prompt token, unless turns have shown it."""
        if model not in self._by_token:
            self._by_token[model] = Mean()
            self._by_token[model].add(read_s)

    def read_s(self, model: str) -> float | None:
        """Return the time per prompt token of a model's engine, in seconds; None until known."""
        read = self._by_token.get(model)
        return None if read is None else read.value

    def weigh(self, model: str, fresh_tokens: int, answer_tokens: int) -> float:
        """Return a turn's cost in answer tokens; prompt tokens count the same until both rates are known."""
        read, write = self._by_token.get(model), self._by_answer_token.get(model)
        rate = read.value / write.value if read is not None and write is not None else 1.0
        return answer_tokens + fresh_tokens * rate

    def learn_rate(self, model: str, weight: float, slot_s: float) -> None:
        """Learn from a turn's cost in answer tokens and its slot time."""
        if weight > 0 and slot_s > 0:
            self._by_second.setdefault(model, Mean()).add(weight / slot_s)

    def tokens_in(self, model: str, slot_s: float) -> float:
        """Return the usual cost of ``slot_s`` seconds of a slot, in answer tokens."""
        known = self._by_second.get(model)
        return slot_s * (known.value if known is not None else LEAST_RATE)

    def worth_waiting(self, model: str, cached: CacheLocation, slots: int, others: int) -> float | None:
        """Return how long a turn should wait for one of ``slots``, all taken, behind ``others``; None for no wait.

        The lengths of turns are treated as memoryless: the next turn ends after the mean length divided by the slots.
        """
        read, turn = self._by_token.get(model), self._by_turn.get(model)
        if read is None or turn is None:
            return None
        cost = read.value * cached.tokens
        return cost if turn.value * (others + 1) / slots < cost else None


class Deferrals:
    """The ready turns that wait for one worker, the longest wait first."""

    def __init__(self) -> None:
        self._by_worker: dict[str, dict[TurnKey, ReadyTurn]] = {}
        self._worker_of: dict[TurnKey, str] = {}

    def __repr__(self) -> str:
        return f"<Deferrals { ({worker: len(turns) for worker, turns in self._by_worker.items()}) }>"

    def __iter__(self) -> Iterator[tuple[ReadyTurn, str]]:
        """Iterate over the turns, each with its worker."""
        return ((turn, worker) for worker, turns in self._by_worker.items() for turn in turns.values())

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that turns wait for."""
        return tuple(self._by_worker)

    def count(self, worker: str) -> int:
        """Count the turns that wait for a worker."""
        return len(self._by_worker.get(worker, ()))

    def put(self, turn: ReadyTurn, worker: str) -> None:
        """Let a turn wait for a worker."""
        self._by_worker.setdefault(worker, {})[turn.key] = turn
        self._worker_of[turn.key] = worker

    def all_for(self, worker: str) -> tuple[ReadyTurn, ...]:
        """Return the turns that wait for a worker, the longest wait first."""
        return tuple(self._by_worker.get(worker, {}).values())

    def worker_of(self, key: TurnKey) -> str | None:
        """Return the worker that a turn waits for, None if it waits for any."""
        return self._worker_of.get(key)

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """End a turn's wait; return the turn if it waited."""
        worker = self._worker_of.pop(key, None)
        if worker is None:
            return None
        turns = self._by_worker[worker]
        turn = turns.pop(key)
        if not turns:
            del self._by_worker[worker]
        return turn
