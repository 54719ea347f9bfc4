"""The LoRA adapters, which agents name as models: those of the configuration, and those loaded since."""

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import anyio

from service.errors import AdapterInUse, AdapterNotFound, ModelNotFound, StoreUnavailable
from service.node.job_door import JobDoor
from workers.adapters.model_adapters import ModelAdapters
from workers.errors import AdapterTaken
from workers.fleet import Fleet

SETTLE_LIMIT_S: Final = 10.0


class Adapters:
    """The one list of adapter names; a name means one version of one adapter of one model."""

    def __init__(self, fleet: Fleet, models: Collection[str]) -> None:
        self._fleet = fleet
        self._models = models  # shared with its owner, so always up to date
        self._arriving: Counter[tuple[str, str]] = Counter()
        self._leaving: set[str] = set()

    def __repr__(self) -> str:
        return f"<Adapters {list(self.names())}>"

    def names(self) -> dict[str, str]:
        """Return every adapter that jobs may use, with its base model."""
        return {
            name: model
            for model, adapters in self._fleet.adapters.items()
            for name in adapters.names
            if name not in self._leaving
        }

    def of_model(self, model: str) -> ModelAdapters:
        """Return a model's adapters.

        Raises:
            ModelNotFound: the model cannot have adapters here.
        """
        adapters = self._fleet.adapters.get(model)
        if adapters is None:
            raise ModelNotFound(model, self._fleet.models(), list(self._fleet.adapters), "that takes adapters")
        return adapters

    async def load(self, model: str, name: str, path: Path) -> bool:
        """Load an adapter by name onto a model's engines, also for restarts; return whether it is new to them.

        Raises:
            ServiceError: it cannot be loaded; nothing has changed.
            AdapterError: an engine of the model cannot load it; nothing has changed.
        """
        adapters = self.of_model(model)
        if name in self._models:
            raise AdapterTaken(f"{name} is a model")
        arriving = [owner for owner, other in self._arriving if other == name]
        past = [owner for owner, other in self._fleet.adapters.items() if name in other.past]
        for owner in (*arriving, *past, self.names().get(name, model)):
            if owner != model:
                raise AdapterTaken(f"{name} is an adapter of {owner}, was one, or is about to be")
        if name in self._leaving:
            raise AdapterTaken(f"{name} is about to be unloaded")
        self._arriving[model, name] += 1
        try:
            return await adapters.load(name, path)
        finally:
            self._arriving[model, name] -= 1
            self._arriving += Counter()  # drops names without loads

    async def unload(self, model: str, name: str, door: JobDoor, users: Callable[[str], int]) -> None:
        """Unload an adapter that no unfinished job uses from a model's engines; refuse it to new jobs from now on.

        ``users`` counts the jobs on the scheduler that use a name.

        Raises:
            ServiceError: it cannot be unloaded; nothing has changed.
            AdapterError: an engine of the model cannot unload it; nothing has changed.
        """
        adapters = self.of_model(model)
        if name not in adapters.loaded or name in self._leaving:
            raise AdapterNotFound(model, name, is_configured=name in adapters.configured)
        self._leaving.add(name)
        try:
            await self._wait_settled(door)
            count = users(name)
            if count:
                raise AdapterInUse(f"{count} unfinished jobs use {name}; cancel them, or wait for their ends")
            await adapters.unload(name)
        finally:
            self._leaving.discard(name)

    async def _wait_settled(self, door: JobDoor) -> None:
        """Return when every job that may have been accepted with the name is on the scheduler."""
        with anyio.move_on_after(SETTLE_LIMIT_S):
            await door.wait_settled()
            return
        raise StoreUnavailable("jobs are still being taken or read back; try again")
