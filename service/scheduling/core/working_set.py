"""The working set of open conversations: how full KV caches are beside the turns in flight. Pure.

Source: P. Denning, "The working set model for program behavior" (1968); specification, "Capacity in tokens".
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.in_flight_pool import InFlightPool

PRESSED: Final = 0.95  # share of the KV caches in use from which new conversations wait
RELIEVED: Final = 0.8  # share below which they no longer wait
BUSY: Final = 0.5  # share used by turns in flight below which new conversations begin anyway, so that no slot is idle


class WorkingSet:
    """The contexts of agents between two turns, by model, and whether they fill its caches with those in flight."""

    def __init__(self, in_flight: InFlightPool) -> None:
        self._in_flight = in_flight
        # By conversation and agent: its model and tokens
        self._contexts: dict[tuple[JobId, str], dict[str, tuple[str, int]]] = {}
        self._idle: Counter[str] = Counter()
        self._pressed: set[str] = set()

    def __repr__(self) -> str:
        return f"<WorkingSet {dict(self._idle)} pressed={sorted(self._pressed)}>"

    @property
    def idle(self) -> Mapping[str, int]:
        """The tokens of contexts between two turns, by model."""
        return dict(self._idle)

    @property
    def conversations(self) -> tuple[tuple[JobId, str], ...]:
        """The conversations with the context of an agent between two turns."""
        return tuple(self._contexts)

    @property
    def pressed(self) -> frozenset[str]:
        """The models whose begun conversations go before new ones."""
        return frozenset(self._pressed)

    def is_pressed(self, model: str) -> bool:
        """Whether begun conversations of a model go before new ones."""
        return model in self._pressed

    def may_begin(self, model: str) -> bool:
        """Whether a new conversation may begin now."""
        if model not in self._pressed:
            return True
        budget = self._in_flight.models[model].kv_budget
        return budget is None or self._in_flight.models[model].kv_reserved < BUSY * budget

    def start(self, key: TurnKey, model: str) -> None:
        """Record a turn's start: it uses the context of its agent."""
        self._drop(key[:2], key.agent_id)
        self.measure(model)

    def end_turn(self, key: TurnKey, model: str, tokens: int) -> None:
        """Record the context that a turn leaves for its agent's next one; 0 if no turn follows."""
        self._drop(key[:2], key.agent_id)
        if tokens:
            self._contexts.setdefault(key[:2], {})[key.agent_id] = model, tokens
            self._idle[model] += tokens
        self.measure(model)

    def forget(self, job_id: JobId, conversation_id: str) -> None:
        """Forget a conversation that has ended or left."""
        place = job_id, conversation_id
        for agent, (model, _) in list(self._contexts.get(place, {}).items()):
            self._drop(place, agent)
            self.measure(model)

    def measure(self, model: str) -> None:
        """Measure how full the caches of a model are."""
        budget = self._in_flight.models[model].kv_budget
        idle = self._idle[model]
        load = idle + (self._in_flight.models[model].kv_reserved if idle else 0)
        if budget is None or load < RELIEVED * budget:
            self._pressed.discard(model)
        elif idle and load > PRESSED * budget:
            self._pressed.add(model)

    def _drop(self, place: tuple[JobId, str], agent: str) -> None:
        contexts = self._contexts.get(place, {})
        model, tokens = contexts.pop(agent, ("", 0))
        if not contexts:
            self._contexts.pop(place, None)
        if tokens:
            self._idle[model] -= tokens
            if not self._idle[model]:
                del self._idle[model]
