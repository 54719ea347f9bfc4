"""The usage of attempts and of kept slots, as charged to their keys, and the measures of attempts."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

import msgspec

from service.conversations.job import Agent, Job, TurnKey
from service.conversations.measures import AttemptMeasures, UsageCounts
from service.conversations.states import TurnState
from service.scheduling.core.events import SlotsKept, TurnSpent
from service.store.records import RequestUsed, UsageKey, Used
from workers.requests.answer import Answer

LEAST_TOKENS: Final = 2  # of an answer that tells what one takes


class _Keeping:
    def __init__(self, whose: UsageKey) -> None:
        self.whose = whose
        self.slots = 0
        self.slot_s = 0.0


class KeptSlots:
    """Adds up the seconds for which slots were kept; ``whose`` tells where a waiting turn's use is counted."""

    def __init__(self, whose: Callable[[TurnKey], UsageKey]) -> None:
        self._whose = whose
        self._keeping: dict[TurnKey, _Keeping] = {}
        self._over: list[SlotsKept] = []
        self._at = 0.0

    def __repr__(self) -> str:
        return f"<KeptSlots {self._keeping}>"

    def settle(self, kept: Mapping[TurnKey, int], now: float) -> list[RequestUsed]:
        """Set the slots that are kept from ``now`` on, by turn; return the usage of those kept no longer."""
        if not (kept or self._keeping):
            return []
        for keeping in self._keeping.values():
            keeping.slot_s += keeping.slots * (now - self._at)
        self._at = now
        over = [self._keeping.pop(key) for key in self._keeping.keys() - kept.keys()]
        for key, slots in kept.items():
            if key not in self._keeping:
                self._keeping[key] = _Keeping(whose=self._whose(key))
            self._keeping[key].slots = slots
        self._over += (
            SlotsKept(owner=each.whose.key_name or None, model=each.whose.model, slot_s=each.slot_s) for each in over
        )
        return [RequestUsed(used=(each.whose, UsageCounts(slot_s=each.slot_s))) for each in over]

    def take_over(self) -> list[SlotsKept]:
        """Take the kept slots since the last call, for the core."""
        over, self._over = self._over, []
        return over


def used_by(whose: UsageKey, answer: Answer, seconds: float, *, stands: bool) -> Used:
    """Return the usage of an attempt; if the attempt does not stand, its tokens are wasted."""
    cost = answer.told_cost
    if not stands:
        wasted = cost.prompt_tokens - cost.cached_tokens + cost.completion_tokens
        return whose, UsageCounts(attempts=1, wasted_tokens=max(0, wasted), slot_s=seconds)
    return whose, UsageCounts(
        turns=1,
        attempts=1,
        prompt_tokens=cost.prompt_tokens,
        cached_tokens=cost.cached_tokens,
        answer_tokens=cost.completion_tokens,
        slot_s=seconds,
    )


def key_of(job: Job, agent: Agent, at: datetime) -> UsageKey:
    """Return where the use of a job's turn is counted."""
    return UsageKey(
        day=at.date().isoformat(), key_name=job.owner or "", job_id=job.id, agent=agent.id, model=agent.model
    )


def spent_by(key: TurnKey, answer: Answer, seconds: float) -> TurnSpent:
    """Return the tokens that an ended attempt took of its engine, and the seconds that it held its slot."""
    cost = answer.cost
    fresh = max(0, cost.prompt_tokens - cost.cached_tokens)
    is_told = answer.is_told
    return TurnSpent(
        key=key, fresh_tokens=fresh, answer_tokens=cost.completion_tokens, seconds=seconds, is_told=is_told
    )


class AttemptPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The worker and the beginning of an attempt; ``began_s`` is when it had its slot, by the clock of its answer."""

    worker: str
    incarnation: int
    began_at: datetime
    began_s: float


def measures_of(
    place: AttemptPlace, answer: Answer, used: Used, outcome: TurnState, reason: str | None
) -> AttemptMeasures:
    """Return the measures of an ended attempt."""
    first_at, cost = answer.first_token_at, answer.told_cost
    whose, counts = used
    return AttemptMeasures(
        model=whose.model,
        worker=place.worker,
        incarnation=place.incarnation,
        outcome=outcome,
        reason=reason,
        began_at=place.began_at,
        seconds=counts.slot_s,
        used=counts,
        usage=(cost.prompt_tokens, cost.cached_tokens, cost.completion_tokens),
        first_token_s=None if first_at is None else max(0.0, first_at - place.began_s),
        token_s=_token_s(answer),
        finish_reason=answer.finish_reason,
    )


def _token_s(answer: Answer) -> float | None:
    generation = answer.generation
    first_at, usage = generation.first_token_at, generation.usage
    if first_at is None or usage is None or usage.completion_tokens < LEAST_TOKENS:
        return None
    return max(0.0, generation.last_progress_at - first_at) / (usage.completion_tokens - 1)
