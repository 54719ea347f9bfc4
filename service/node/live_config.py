"""The configuration in force, for parts of a node that follow its changes."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import overload

import msgspec

from service.config.schema import Config
from service.scheduling.keeping.request_queue import QueueRules
from workers.spec import WorkerSpec


class ReloadFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed reload, which changed nothing."""

    at: datetime
    detail: str


class LiveConfig:
    """The configuration, replaced as a whole by reloads only; ``shares`` holds keys' shares by name, None without them.

    ``shares`` is one mapping for the node's life, since the queues of all models refer to it.
    """

    def __init__(
        self, config: Config, specs: Sequence[WorkerSpec], shares: Mapping[str | None, float] | None = None
    ) -> None:
        self.config = config
        self.shares = None if shares is None else dict(shares)
        self.loaded_at = datetime.now(UTC)
        self.failure: ReloadFailure | None = None  # the last reload's, None if it succeeded
        self.models = ServedModels(self)
        self.leads: Callable[[str], bool] = lambda _model: True  # whether this node serves a model that spans nodes
        self._specs = _first_of_each(specs)

    def __repr__(self) -> str:
        return f"<LiveConfig of {self.loaded_at:%H:%M:%S} with {list(self.config.models)}>"

    def spec_of(self, model: str) -> WorkerSpec | None:
        """Return the specification of a model's workers; None if the model is not configured here."""
        return self._specs.get(model)

    def replace(self, config: Config, specs: Sequence[WorkerSpec], shares: Mapping[str | None, float] | None) -> None:
        """Put another configuration in force."""
        self.config, self._specs, self.loaded_at = config, _first_of_each(specs), datetime.now(UTC)
        if self.shares is not None:
            self.shares.clear()
            self.shares.update(shares or {})


class ServedModels(Sequence[str]):
    """The names of the presently configured models, without those that other nodes serve over a span."""

    def __init__(self, live: LiveConfig) -> None:
        self._live = live

    def __repr__(self) -> str:
        return f"<ServedModels {list(self)}>"

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> tuple[str, ...]:
        return tuple(filter(self.__contains__, self._live.config.models))

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        """Return a name by its place in the configuration."""
        return self._names()[place]

    def __contains__(self, name: object) -> bool:
        model = self._live.config.models.get(name) if isinstance(name, str) else None
        return model is not None and (model.span.nodes == 1 or self._live.leads(str(name)))


def queue_rules(config: Config) -> QueueRules:
    """Return the rules for waiting requests of clients."""
    return QueueRules(
        requests=config.server.queue,
        bytes=config.limits.queue_bytes,
        holds_slots=config.scheduling.hold_slots,
    )


def _first_of_each(specs: Sequence[WorkerSpec]) -> dict[str, WorkerSpec]:
    return {spec.name: spec for spec in reversed(specs)}
