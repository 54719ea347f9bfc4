"""What turns in flight are seen to take of their workers' KV caches."""

from collections.abc import Mapping, Sequence

from service.conversations.job import TurnKey
from service.scheduling.core.capacity.kv_budgets import KvUse
from service.scheduling.work import Work
from workers.fleet import Fleet


class KvUses:
    """Owned by the scheduler, which tells the core; only of workers that lend their cache by tokens."""

    def __init__(self, fleet: Fleet, works: Sequence[Work]) -> None:
        self._fleet = fleet
        self._works = works
        self._seen: dict[TurnKey, KvUse] = {}

    def __repr__(self) -> str:
        return f"<KvUses of {len(self._seen)} turns>"

    def look(self) -> Mapping[TurnKey, KvUse]:
        """Return what each turn takes that takes something else than at the last look; tokens."""
        lenders = {worker.spec.id for worker in self._fleet if worker.kv.budget is not None}
        if not lenders:
            return {}
        seen: dict[TurnKey, KvUse] = {}
        for turn in (turn for work in self._works for turn in work.on_slots()):
            answer = turn.answer
            prompt = answer.told_prompt_tokens if turn.worker in lenders else None
            if prompt is not None:
                seen[turn.key] = KvUse(prompt=prompt, answer=answer.generation.output_tokens)
        before, self._seen = self._seen, seen
        return {key: use for key, use in seen.items() if use != before.get(key)}
