"""The plan of a reload: settings that change at once, workers to replace, changes to refuse. Pure.

Source: specification, "Reload".
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from service.config.machine_plan import MEMORY
from service.config.model import ModelConfig
from service.config.schema import Config
from service.config.source import LoadedConfig
from service.errors import Fault
from service.formats.faults import defaults_of
from workers.engine.launch.flags import named
from workers.spec import WorkerSpec

_LANES: Final = "lanes are laid out once, at startup"
_QUEUES: Final = "waiting turns are already queued by it"
_ADAPTERS: Final = "adapters change only by POST and DELETE /v1/models/NAME/adapters"
_REASONS: Final[Mapping[str, str]] = {
    "server.host": "its socket listens there",
    "server.port": "its socket listens there",
    "server.address": "other nodes know it by this address",
    "server.state_dir": "its store and its list of processes are there",
    "store.url": "its jobs are stored there",
    "store.lease_s": "other nodes rely on it",
    "scheduling.policy": _QUEUES,
    "scheduling.group_by": _QUEUES,
    "gpus": _LANES,
    "telemetry.traces": "their exporter is set up at startup",
    "models.NAME.span": "all its nodes must agree",
    "models.NAME.placement": _LANES,
    "models.NAME.pin": _LANES,
    "models.NAME.keep_s": _LANES,
    "models.NAME.memory_mib": _LANES,
    "models.NAME.adapters": _ADAPTERS,
    "models.NAME.max_adapters": _ADAPTERS,
}
_SECTIONS: Final = ("server", "store", "webhooks", "scheduling", "telemetry", "limits", "gpus", "rollouts")


class Effect(StrEnum):
    """The consequence of a changed setting."""

    AT_ONCE = "at once"  # for work that begins from then on
    RESIZE = "workers join or leave"  # the others go on
    ROLL = "worker after worker"  # each finishes its work, then another takes its place
    RESTART = "restart"  # refused while Roundhouse runs


_NOW, _ROLL, _RESTART = Effect.AT_ONCE, Effect.ROLL, Effect.RESTART
# All settings; a test compares this table with the schema and the reference.
EFFECTS: Final[Mapping[str, Effect]] = {
    "server.host": _RESTART,
    "server.port": _RESTART,
    "server.address": _RESTART,
    "server.state_dir": _RESTART,
    "server.api_keys": _NOW,
    "server.keys": _NOW,
    "server.keys_file": _NOW,
    "server.hosts": _NOW,
    "server.origins": _NOW,
    "server.roots": _NOW,
    "server.drain_s": _NOW,
    "server.heartbeat_s": _NOW,
    "server.queue": _NOW,
    "server.wait_s": _NOW,
    "server.log": _NOW,
    "store.url": _RESTART,
    "store.lease_s": _RESTART,
    "store.keep_jobs_s": _NOW,
    "store.keep_keys_s": _NOW,
    "store.keep_events": _NOW,
    "store.keep_usage_days": _NOW,
    "webhooks.hosts": _NOW,
    "webhooks.secrets": _NOW,
    "webhooks.private": _NOW,
    "webhooks.timeout_s": _NOW,
    "webhooks.give_up_s": _NOW,
    "scheduling.policy": _RESTART,
    "scheduling.group_by": _RESTART,
    "scheduling.swap": _NOW,
    "scheduling.hold_slots": _NOW,
    "limits": _NOW,
    "gpus": _RESTART,
    "telemetry.traces": _RESTART,
    "rollouts.rewards": _NOW,
    "rollouts.reward_s": _NOW,
    "rollouts.most_mib": _NOW,
    "models.NAME.engine": _ROLL,
    "models.NAME.model": _ROLL,
    "models.NAME.command": _ROLL,
    "models.NAME.args": _ROLL,
    "models.NAME.env": _ROLL,
    "models.NAME.span": _RESTART,
    "models.NAME.placement": _RESTART,
    "models.NAME.pin": _RESTART,
    "models.NAME.keep_s": _RESTART,
    "models.NAME.memory_mib": _RESTART,
    "models.NAME.devices": _ROLL,
    "models.NAME.replicas": Effect.RESIZE,
    "models.NAME.spares": Effect.RESIZE,
    "models.NAME.host": _ROLL,
    "models.NAME.port": _ROLL,
    "models.NAME.socket_dir": _ROLL,
    "models.NAME.url": _ROLL,
    "models.NAME.headers": _ROLL,
    "models.NAME.slots": _ROLL,
    "models.NAME.capacity": _ROLL,
    "models.NAME.kv_tokens": _ROLL,
    "models.NAME.context": _ROLL,
    "models.NAME.max_answer": _ROLL,
    "models.NAME.continuation": _ROLL,
    "models.NAME.params": _ROLL,
    "models.NAME.door": _NOW,
    "models.NAME.timeouts": _ROLL,
    "models.NAME.restart": _ROLL,
    "models.NAME.tools.iterations": _ROLL,
    "models.NAME.tools.stuck": _ROLL,
    "models.NAME.tools.timeout_s": _ROLL,
    "models.NAME.tools.fallback": _ROLL,
    "models.NAME.tools.arguments": _ROLL,
    "models.NAME.tools.python": _NOW,
    "models.NAME.tools.mcp": _NOW,
    "models.NAME.tools.http": _NOW,
    "models.NAME.repetition": _ROLL,
    "models.NAME.bios": _ROLL,
    "models.NAME.weights": _ROLL,
    "models.NAME.adapters": _RESTART,
    "models.NAME.max_adapters": _RESTART,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """The steps of a reload. ``changed`` are settings that change at once; the other fields name models.

    Where anything is ``refused``, nothing at all changes.
    """

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()  # worker after worker
    unchanged: tuple[str, ...] = ()
    refused: tuple[Fault, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not (self.changed or self.added or self.removed or self.resized or self.restarted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A changed setting; ``rule`` is its row of the table."""

    path: str
    rule: str
    model: str | None = None

    @property
    def effect(self) -> Effect:
        return EFFECTS[self.rule]


def plan_reload(old: LoadedConfig, new: LoadedConfig, adapters: Mapping[str, str] = MappingProxyType({})) -> ReloadPlan:
    """Plan the reload from ``old`` to ``new``.

    ``adapters`` maps each adapter that is loaded at the moment to its model.
    """
    before, after = old.config.models, new.config.models
    settings = list(_settings(old.config, new.config))
    added, removed = _without(after, before), _without(before, after)
    both = _without(after, added)
    first_before, first_after = _first_specs(old), _first_specs(new)
    restarted = [name for name in both if first_before.get(name) != first_after.get(name)]
    resized = [name for name in both if _size(before[name]) != _size(after[name])]
    changed = [each.path for each in settings if each.effect is _NOW or _means_nothing(each, restarted)]
    if old.callers != new.callers and not any(path.startswith(("server.keys", "server.api_keys")) for path in changed):
        changed.append("server.keys_file")  # its content
    touched = {each.model for each in settings}
    refused = _refused(old.config, new.config, settings, adapters)
    return ReloadPlan(
        changed=tuple(changed),
        added=added,
        removed=removed,
        resized=tuple(resized),
        restarted=tuple(restarted),
        unchanged=_without(both, {*touched, *restarted}),
        refused=tuple(refused),
    )


def _size(model: ModelConfig) -> tuple[int, int | str]:
    return model.replicas, model.spares


def _without(names: Iterable[str], others: Container[str | None]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def keep_parts(old: LoadedConfig, new: LoadedConfig) -> LoadedConfig:
    """Return the new configuration, without raising the part of a device's memory that unchanged engines have.

    With fewer vLLM engines on a device each would get a larger part, and be restarted for it.
    """
    before, after = _first_specs(old), _first_specs(new)
    kept = {name: part for name in before.keys() & after.keys() if (part := _kept_part(before[name], after[name]))}
    named_by_author = {
        name for loaded in (old, new) for name, model in loaded.config.models.items() if MEMORY in named(model.args)
    }
    specs = [
        replace(spec, args={**spec.args, MEMORY: kept[spec.name]})
        if spec.lane is None and spec.name in kept.keys() - named_by_author
        else spec
        for spec in new.specs
    ]
    return replace(new, specs=specs)


def _kept_part(old: WorkerSpec, new: WorkerSpec) -> float | None:
    """Return the engines' present part of the memory if a larger part is their only change, else None."""
    part, wanted = old.args.get(MEMORY), new.args.get(MEMORY, 1.0)
    if not isinstance(part, float) or not isinstance(wanted, float) or part >= wanted:
        return None
    return part if replace(new, args={**new.args, MEMORY: part}) == old else None


def _means_nothing(setting: _Setting, restarted: list[str]) -> bool:
    """Whether a setting is written differently but leaves the model's workers unchanged."""
    return setting.effect is _ROLL and setting.model not in restarted


def _first_specs(loaded: LoadedConfig) -> dict[str, WorkerSpec]:
    """Return the first worker's specification of each fixed model, without its tool runner."""
    found: dict[str, WorkerSpec] = {}
    for spec in loaded.specs:
        if spec.lane is None:
            found.setdefault(spec.name, replace(spec, tool_runner=None))
    return found


def _settings(old: Config, new: Config) -> Iterator[_Setting]:
    """Iterate over the changed settings, except for models that come or go."""
    for section in _SECTIONS:
        for name in _changed_keys(getattr(old, section), getattr(new, section)):
            path = f"{section}.{name}"
            yield _Setting(path=path, rule=path if path in EFFECTS else section)
    for model, after in new.models.items():
        before = old.models.get(model, after)
        keys = [key for key in _changed_keys(before, after) if key != "tools"]
        for key in (*keys, *(f"tools.{each}" for each in _changed_keys(before.tools, after.tools))):
            yield _Setting(path=f"models.{model}.{key}", rule=f"models.NAME.{key}", model=model)


def _changed_keys(old: object, new: object) -> list[str]:
    return [name for name in defaults_of(type(old)) if getattr(old, name) != getattr(new, name)]


def _refused(old: Config, new: Config, settings: list[_Setting], adapters: Mapping[str, str]) -> Iterator[Fault]:
    on_lanes = {
        name for models in (old.models, new.models) for name, each in models.items() if each.placement != "fixed"
    }
    for each in settings:
        if each.effect is _RESTART:
            yield _fault(each.path, _REASONS[each.rule])
        elif each.effect is not _NOW and each.model in on_lanes:
            yield _fault(each.path, f"{each.model} is placed on lanes, and {_LANES}")
    for name in sorted(on_lanes & (old.models.keys() ^ new.models.keys())):
        yield _fault(f"models.{name}", f"it is placed on lanes, and {_LANES}")
    for name in _without(new.models, old.models):
        for other in (name, *new.models[name].adapters):
            if other in adapters and adapters[other] in new.models:
                yield _fault(f"models.{name}", f"{other} is an adapter of {adapters[other]} that was loaded meanwhile")


def _fault(path: str, reason: str) -> Fault:
    return Fault(path=path, message=f"cannot change while Roundhouse runs, since {reason}; restart it")
