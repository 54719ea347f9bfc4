"""What turns in flight are seen to take of their workers' KV caches."""

from collections.abc import Mapping

from service.conversations.job import TurnKey
from service.scheduling.core.capacity.kv_budgets import KvUse
from service.scheduling.turns import Turns
from workers.fleet import Fleet


class KvUses:
    """Owned by the scheduler, which tells the core; only of workers that lend their cache by tokens."""

    def __init__(self, fleet: Fleet, turns: Turns) -> None:
        self._fleet = fleet
        self._turns = turns
        self._seen: dict[TurnKey, KvUse] = {}

    def __repr__(self) -> str:
        return f"<KvUses of {len(self._seen)} turns>"

    def look(self) -> Mapping[TurnKey, KvUse]:
        """Return what each turn takes that takes something else than at the last look; tokens."""
        lenders = {worker.spec.id for worker in self._fleet if worker.kv.budget is not None}
        if not lenders:
            return {}
        seen: dict[TurnKey, KvUse] = {}
        for run in self._turns.in_flight():
            answer = run.attempt.answer
            prompt = answer.told_prompt_tokens if run.attempt.worker in lenders else None
            if prompt is not None:
                seen[run.key] = KvUse(prompt=prompt, answer=answer.generation.output_tokens)
        before, self._seen = self._seen, seen
        return {key: use for key, use in seen.items() if use != before.get(key)}
