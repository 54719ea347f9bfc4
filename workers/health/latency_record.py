"""The expected latencies of one worker's answers, beside the measured ones."""

from collections import deque
from statistics import median
from typing import Final

from workers.health.evidence import Observations
from workers.policy.pace import AnswerWork, EnginePace, latency_ms
from workers.process.handed_over import HeldPace
from workers.requests.answer import Answer

REMEMBERED: Final = 100  # answers


class LatencyRecord:
    """Compares each complete answer with the prediction from the engine's pace.

    Source: specification, "Latency model".
    """

    def __init__(self, observations: Observations, quantum: int) -> None:
        self._observations = observations
        self.quantum = quantum
        self._errors: deque[float] = deque(maxlen=REMEMBERED)

    def __repr__(self) -> str:
        return f"<LatencyRecord error={self.error}>"

    @property
    def pace(self) -> EnginePace:
        """The speed of the engine."""
        return self._observations.pace

    @property
    def error(self) -> float | None:
        """The median error of predictions, relative to the real duration; None without any."""
        return median(self._errors) if self._errors else None

    def hand_over_pace(self) -> HeldPace:
        """Return the learned pace for another program."""
        pace = self.pace
        return HeldPace(
            rates=list(pace.rates),
            tokens_a_char=pace.tokens_a_char,
            steps_s=list(pace.steps_s),
            errors=list(self._errors),
        )

    def restore(self, held: HeldPace) -> None:
        """Continue with the pace that another program learned of the same engine."""
        self._observations.pace = EnginePace(
            rates=tuple(held.rates), tokens_a_char=held.tokens_a_char, steps_s=tuple(held.steps_s)
        )
        self._errors.extend(held.errors)

    def note_answer(self, answer: Answer, seconds: float) -> None:
        """Compare a complete answer with its prediction; called before the pace is learned from it."""
        usage = answer.usage
        if usage is None or seconds <= 0:
            return
        work = AnswerWork(
            fresh_tokens=usage.prompt_tokens - usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            tools_s=answer.tools_s,
        )
        answer.predicted_ms = latency_ms(self.pace, work, self.quantum)
        if answer.predicted_ms is not None:
            self._errors.append(abs(answer.predicted_ms / 1000 - seconds) / seconds)
