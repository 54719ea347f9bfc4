"""The turns that wait for models which come to lanes on demand, in the order in which they got ready. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Final

from service.conversations.job import TurnKey
from service.scheduling.core.queue.ready_queue import ReadyTurn
from workers.policy.placement import AHEAD, Waiting

FRONT: Final = 0  # the place of a turn that was on a slot before


class Arrivals:
    """Knows who has waited longest, whatever the policy lets go first; turns of other models are passed over."""

    def __init__(self, models: Iterable[str]) -> None:
        self._orders: dict[str, OrderedDict[TurnKey, int]] = {model: OrderedDict() for model in models}
        self._models: dict[TurnKey, str] = {}

    def __repr__(self) -> str:
        return f"<Arrivals {[(model, len(orders)) for model, orders in self._orders.items()]}>"

    def add(self, turn: ReadyTurn, model: str) -> None:
        """Take a turn that has got ready."""
        orders = self._orders.get(model)
        if orders is None:
            return
        self._models[turn.key] = model
        orders[turn.key] = FRONT if turn.is_front else turn.ready_order
        if turn.is_front:
            orders.move_to_end(turn.key, last=False)

    def remove(self, key: TurnKey) -> None:
        """Take a turn out that waits no more."""
        model = self._models.pop(key, None)
        if model is not None:
            del self._orders[model][key]

    def waiting(self) -> dict[str, Waiting]:
        """Return what waits for each model."""
        return {
            model: Waiting(count=len(orders), first=tuple(islice(orders.values(), AHEAD)))
            for model, orders in self._orders.items()
        }
