"""What an attempt has used, as its key is told of it."""

from datetime import datetime

from service.conversations.job import Agent, Job, TurnKey
from service.scheduling.core.events import TurnSpent
from service.store.records import UsageCounts, UsageKey, Used
from workers.requests.answer import Answer


def used_by(whose: UsageKey, answer: Answer, seconds: float, *, stands: bool) -> Used:
    """Return what an attempt has used that held its slot for so long; of one that does not stand, all is wasted."""
    cost = answer.cost
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


def spent_by(key: TurnKey, answer: Answer) -> TurnSpent:
    """Return what an attempt that has ended has taken of its engine."""
    cost = answer.cost
    fresh = max(0, cost.prompt_tokens - cost.cached_tokens)
    return TurnSpent(key=key, fresh_tokens=fresh, answer_tokens=cost.completion_tokens)
