"""What an attempt has used, as its key is told of it."""

from datetime import datetime

from service.conversations.job import Agent, Job, TurnKey
from service.scheduling.attempt import RunningAttempt
from service.scheduling.core.events import TurnSpent
from service.store.records import UsageCounts, UsageKey, Used


def used_by(attempt: RunningAttempt, job: Job, agent: Agent, at: datetime, *, stands: bool) -> Used:
    """Return what an attempt has used that has ended; of one that does not stand, all tokens are wasted."""
    key = UsageKey(
        day=at.date().isoformat(), key_name=job.owner or "", job_id=job.id, agent=agent.id, model=agent.model
    )
    cost = attempt.answer.cost
    if not stands:
        wasted = cost.prompt_tokens - cost.cached_tokens + cost.completion_tokens
        return key, UsageCounts(attempts=1, wasted_tokens=max(0, wasted), slot_s=attempt.seconds)
    return key, UsageCounts(
        turns=1,
        attempts=1,
        prompt_tokens=cost.prompt_tokens,
        cached_tokens=cost.cached_tokens,
        answer_tokens=cost.completion_tokens,
        slot_s=attempt.seconds,
    )


def spent_by(key: TurnKey, attempt: RunningAttempt) -> TurnSpent:
    """Return what an attempt that has ended has taken of its engine."""
    cost = attempt.answer.cost
    fresh = max(0, cost.prompt_tokens - cost.cached_tokens)
    return TurnSpent(key=key, fresh_tokens=fresh, answer_tokens=cost.completion_tokens)
