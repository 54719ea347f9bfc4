"""One attempt of a turn on a slot of one engine, for a job's turn or a client's request."""

import time
from datetime import UTC, datetime, timedelta
from typing import Final

from anyio import CancelScope
from msgspec.structs import replace

from service.conversations.job.job import Agent, TurnKey
from service.conversations.job.states import TurnState
from service.conversations.record.measures import AttemptMeasures, UsageCounts
from service.scheduling.core.events import TurnSpent
from service.scheduling.core.queue.affinity import PromptReading
from service.store.records import UsageKey
from transport.events import Usage
from workers.outcome import Cancelled, CancelReason
from workers.requests.answer import NOTHING, Answer
from workers.requests.halves import HalfAnswer
from workers.requests.in_flight import InFlightRequest

LEAST_TOKENS: Final = 2  # answer tokens from which the time per token is known


class RunningAttempt:
    """An attempt, written by its turn and by its request; it lasts until the turn's next attempt begins."""

    def __init__(self, worker: str, incarnation: int, slots: int = 1) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.slots = slots
        self.started_at = datetime.now(UTC)
        self._began_s = time.monotonic()
        self.answer = Answer(time.monotonic)
        self.request: InFlightRequest | None = None  # the newest one
        self.scope: CancelScope | None = None  # for the time before the request
        self.cancelled: Cancelled | None = None  # set if the service cancelled it
        self.seconds = 0.0  # slot time, once it has ended
        self.lent_s = 0.0  # time in which others had its slot, while its tools or its summary ran
        self.half: HalfAnswer | None = None  # what the next attempt goes on from, once this one has broken off
        self.lost_tokens = 0  # those of a half that was counted, and that this attempt does not go on from
        self.summary: RunningAttempt | None = None  # the summary of the past, made on its slot
        self.loses_summary = False  # the summary's usage is not counted elsewhere

    def __repr__(self) -> str:
        return f"<RunningAttempt {self.worker}#{self.incarnation} {self.answer!r}>"

    def cancel(self, reason: CancelReason) -> None:
        """End the attempt, unless it ends at this moment."""
        self.cancelled = self.cancelled or Cancelled(reason=reason)
        if self.request is not None:
            self.request.end(self.cancelled)
        elif self.scope is not None:
            self.scope.cancel()

    def end(self) -> None:
        """Record its slot time at its end."""
        self.seconds = time.monotonic() - self._began_s - self.lent_s

    @property
    def first_token_s(self) -> float | None:
        """The seconds to its first token, None without one."""
        first_at = self.answer.first_token_at
        return None if first_at is None else max(0.0, first_at - self._began_s)

    @property
    def first_token_at(self) -> datetime | None:
        """The time of its first token, None without one."""
        first_at = self.answer.first_token_at
        return None if first_at is None else self.started_at + timedelta(seconds=first_at - self._began_s)

    @property
    def reading(self) -> PromptReading | None:
        """The engine's reading for the newest generation; None until the engine has reported its usage."""
        generation = self.answer.generation
        usage, first_at = generation.usage, generation.first_token_at
        if usage is None:
            return None
        fresh_tokens, timings = usage.prompt_tokens - usage.cached_tokens, generation.timings
        if first_at is None and timings is not None:  # an unstreamed answer with the engine's timings
            took_s = max(0.0, generation.last_byte_at - generation.started_at)
            seconds = min(timings.prompt_ms / 1000, took_s)
            answer_s = min(timings.completion_ms / 1000, took_s - seconds)
        elif first_at is None:  # the time of the reading is unknown
            fresh_tokens, seconds, answer_s = 0, 0.0, 0.0
        else:
            # An engine that reports its reading answers when it begins to read, another maybe with its first token.
            begun_at = generation.begun_at if generation.prompt_progress is not None else None
            seconds = max(0.0, first_at - (begun_at or generation.started_at))
            answer_s = max(0.0, generation.last_progress_at - first_at)
        return PromptReading(
            fresh_tokens=fresh_tokens,
            seconds=seconds,
            context_tokens=usage.prompt_tokens + usage.completion_tokens,
            answer_tokens=usage.completion_tokens - (generation.carried - generation.rewritten),
            answer_s=answer_s,
        )

    # Its cost, once it has ended

    def spent(self, key: TurnKey) -> TurnSpent:
        """Return the tokens and the slot time that it used, its summary's included."""
        cost, nothing = self.answer.cost, TurnSpent(key=key, fresh_tokens=0, answer_tokens=0)
        rewritten = 0
        if self.answer.is_continued:
            parts = self.answer.cost_parts
            rewritten = parts.rewritten
            cost -= parts.earlier
        made = nothing if self.summary is None else self.summary.spent(key)
        return TurnSpent(
            key=key,
            fresh_tokens=max(0, cost.prompt_tokens - cost.cached_tokens) + made.fresh_tokens,
            answer_tokens=cost.completion_tokens + rewritten + made.answer_tokens,
            seconds=self.seconds + made.seconds,
            is_told=self.answer.is_told and made.is_told,
        )

    def measures(self, model: str, outcome: TurnState, reason: str | None) -> AttemptMeasures:
        """Return its measures and its usage; the tokens of an answer that does not count are wasted."""
        first_at, slot_s = self.answer.first_token_at, self.slots * self.seconds
        cost, inherited, strayed, rewritten = self.answer.told_cost, NOTHING, NOTHING, 0
        lost = self.lost_tokens
        if self.answer.is_continued:
            parts = self.answer.cost_parts
            inherited, strayed, rewritten = parts.earlier, parts.strayed, parts.rewritten
            lost += parts.dropped
            cost -= inherited
        usage = (cost.prompt_tokens, cost.cached_tokens, cost.completion_tokens)
        if outcome is TurnState.COMPLETED:
            kept = cost - strayed if self.answer.is_continued else cost
            used = UsageCounts(
                turns=1,
                attempts=1,
                prompt_tokens=kept.prompt_tokens,
                cached_tokens=kept.cached_tokens,
                answer_tokens=max(0, kept.completion_tokens - lost),
                wasted_tokens=_fresh(strayed) + rewritten + lost,
                slot_s=slot_s,
            )
        else:
            kept = NOTHING if self.half is None else self.half.kept - inherited
            wasted = _fresh(cost - kept) + rewritten + lost
            used = UsageCounts(
                attempts=1,
                prompt_tokens=kept.prompt_tokens,
                cached_tokens=kept.cached_tokens,
                answer_tokens=max(0, kept.completion_tokens - lost),
                wasted_tokens=wasted,
                slot_s=slot_s,
            )
            if self.summary is not None and self.loses_summary:
                summed = self.summary.measures(model, outcome, reason).used
                both = {"wasted_tokens": wasted + summed.wasted_tokens, "slot_s": slot_s + summed.slot_s}
                used = replace(used, **both)
        return AttemptMeasures(
            model=model,
            worker=self.worker,
            incarnation=self.incarnation,
            outcome=outcome,
            reason=reason,
            began_at=self.started_at,
            seconds=slot_s,
            used=used,
            usage=usage,
            first_token_s=None if first_at is None else max(0.0, first_at - self._began_s),
            token_s=_token_s(self.answer),
            finish_reason=self.answer.generation.finish_reason,
        )


def usage_key(agent: Agent, owner: str | None, job_id: str = "") -> UsageKey:
    """Return the row in which a turn's usage counts today; a client's request has no job."""
    day = datetime.now(UTC).date().isoformat()
    return UsageKey(day=day, key_name=owner or "", job_id=job_id, agent=agent.id, model=agent.model)


def _fresh(cost: Usage) -> int:
    return max(0, cost.prompt_tokens - cost.cached_tokens + cost.completion_tokens)


def _token_s(answer: Answer) -> float | None:
    generation = answer.generation
    first_at, usage = generation.first_token_at, generation.usage
    tokens = 0 if usage is None else usage.completion_tokens - (generation.carried - generation.rewritten)
    if first_at is None or tokens < LEAST_TOKENS:
        return None
    return max(0.0, generation.last_progress_at - first_at) / (tokens - 1)
