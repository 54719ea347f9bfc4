"""The effects of a changed configuration, for every setting, by the table that the reference prints."""

import copy
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from service.config.load import build_config
from service.config.model import ModelConfig, ToolsConfig
from service.config.reload_plan import EFFECTS, Effect, ReloadPlan, keep_parts, plan_reload
from service.config.schema import Config
from service.config.source import LoadedConfig, callers_of_config
from service.config.workers import worker_specs
from service.errors import Fault

Document = dict[str, Any]
PROGRAM = {"engine": "llama-server", "command": [sys.executable]}
BASE: Document = {
    "server": {"keys": [{"name": "alice", "key": "a" * 20}]},
    "models": {
        "one": {**PROGRAM, "port": 9100, "replicas": 2},
        "two": {**PROGRAM, "port": 9200},
        "far": {"engine": "attached", "url": "http://127.0.0.1:9", "slots": 2},
    },
}
REFERENCE = Path("docs/reference/configuration.md")


def loaded(document: Document, folder: Path) -> LoadedConfig:
    config = build_config(document, {"state_dir": folder}, "test", {})
    return LoadedConfig(
        config=config, specs=worker_specs(config, folder, folder), callers=callers_of_config(config, folder)
    )


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., ReloadPlan]:
    """Plan the reload after a change of the base, written as dotted names and values; None removes one."""

    def make(changes: Document, adapters: dict[str, str] | None = None, base: Document | None = None) -> ReloadPlan:
        before = copy.deepcopy(base or BASE)
        after = copy.deepcopy(before)
        for path, value in changes.items():
            *parents, last = path.split(".")
            place = after
            for parent in parents:
                place = place.setdefault(parent, {})
            if value is None:
                del place[last]
            else:
                place[last] = value
        return plan_reload(loaded(before, tmp_path), loaded(after, tmp_path), adapters or {})

    return make


def test_the_same_file_changes_nothing(plan: Callable[..., ReloadPlan]) -> None:
    """Python callables and specifications are built again, and still compare equal."""
    assert plan({}) == ReloadPlan(unchanged=("one", "two", "far"))
    assert plan({}).is_empty


def test_a_default_that_is_written_out_changes_nothing(plan: Callable[..., ReloadPlan]) -> None:
    """Values are compared, not text."""
    assert plan({"models.two.context": 4096, "server.drain_s": 30}) == ReloadPlan(unchanged=("one", "two", "far"))


def test_models_come_and_go(plan: Callable[..., ReloadPlan]) -> None:
    """The other models are unchanged."""
    new = {**PROGRAM, "port": 9300, "adapters": {}}
    assert plan({"models.new": new, "models.two": None}) == ReloadPlan(
        added=("new",), removed=("two",), unchanged=("one", "far")
    )


def test_replicas_are_added_and_removed(plan: Callable[..., ReloadPlan]) -> None:
    """No engine is restarted for that."""
    assert plan({"models.one.replicas": 4}) == ReloadPlan(resized=("one",), unchanged=("two", "far"))


def test_flags_restart_workers(plan: Callable[..., ReloadPlan]) -> None:
    """Replicas may change beside them. For an attached server the worker is replaced, not the process."""
    changes = {"models.one.args": {"threads": 2}, "models.one.replicas": 1, "models.far.slots": 3}
    assert plan(changes) == ReloadPlan(resized=("one",), restarted=("one", "far"), unchanged=("two",))


def test_tools_and_limits_and_keys_change_at_once(plan: Callable[..., ReloadPlan]) -> None:
    """No worker is touched for them."""
    changes = {
        "models.one.tools.http": {"url": "http://127.0.0.1:9/run"},
        "limits.body_bytes": 1000,
        "server.keys": [{"name": "bob", "key": "b" * 20}],
        "store.keep_events": 1000,
    }
    changed = ("server.keys", "store.keep_events", "limits.body_bytes", "models.one.tools.http")
    assert plan(changes) == ReloadPlan(changed=changed, unchanged=("two", "far"))


def test_a_changed_key_file_is_a_change(tmp_path: Path) -> None:
    """The configuration itself is the same."""
    file = tmp_path / "keys.yaml"
    document = {**BASE, "server": {"keys_file": "keys.yaml"}}

    def with_key(digit: str) -> LoadedConfig:
        file.write_text(f"[{{name: alice, sha256: '{digit * 64}'}}]")
        file.chmod(0o600)
        return loaded(document, tmp_path)

    assert plan_reload(with_key("1"), with_key("2")).changed == ("server.keys_file",)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("server.port", 9999),
        ("server.host", "localhost"),
        ("store.url", "memory"),
        ("store.lease_s", 5),
        ("scheduling.policy", "fifo"),
        ("scheduling.group_by", "parameters"),
        ("gpus.max_agents_per_gpu", 1),
    ],
)
def test_a_setting_that_needs_a_restart_is_refused_by_name(
    plan: Callable[..., ReloadPlan], path: str, value: object
) -> None:
    """The refusal gives the reason and the remedy."""
    (fault,) = plan({path: value, "models.one.replicas": 4}).refused
    assert fault.path == path
    assert fault.message.startswith("cannot change while Roundhouse runs, since ")
    assert fault.message.endswith("; restart it")


def test_another_state_dir_is_refused(tmp_path: Path) -> None:
    """The command line may give it as well as the file."""
    after = build_config(BASE, {"state_dir": tmp_path / "other"}, "test", {})
    before = loaded(BASE, tmp_path)
    new = LoadedConfig(config=after, specs=before.specs, callers=before.callers)
    assert [fault.path for fault in plan_reload(before, new).refused] == ["server.state_dir"]


def test_all_refused_settings_are_named(plan: Callable[..., ReloadPlan]) -> None:
    """An operator who mends one must not find the next at the next attempt."""
    refused = plan({"server.port": 9999, "store.url": "memory"}).refused
    assert [fault.path for fault in refused] == ["server.port", "store.url"]


def test_adapters_of_a_model_change_by_their_own_route(plan: Callable[..., ReloadPlan]) -> None:
    """The refusal names the route."""
    (fault,) = plan({"models.one.max_adapters": 3}).refused
    assert (fault.path, "/v1/models/NAME/adapters" in fault.message) == ("models.one.max_adapters", True)


def test_a_model_may_not_have_the_name_of_a_loaded_adapter(plan: Callable[..., ReloadPlan]) -> None:
    """A name has one meaning, and the file does not know the loaded adapters."""
    model = {**PROGRAM, "port": 9300}
    (fault,) = plan({"models.voice": model}, {"voice": "one"}).refused
    assert fault == Fault(
        path="models.voice",
        message="cannot change while Roundhouse runs, since voice is an adapter of one that was loaded meanwhile; "
        "restart it",
    )


def test_models_on_lanes_are_refused(tmp_path: Path) -> None:
    """They are added, removed and changed by a restart; their tools change at once."""
    on_lane = {"engine": "llama-server", "command": [sys.executable], "placement": "lanes"}
    without = build_config(BASE, {"state_dir": tmp_path}, "test", {})
    placed = build_config({**BASE, "models": {**BASE["models"], "l": on_lane}}, {"state_dir": tmp_path}, "test", {})
    wider = build_config(
        {**BASE, "models": {**BASE["models"], "l": {**on_lane, "slots": 9}}}, {"state_dir": tmp_path}, "test", {}
    )

    def refused(old: Config, new: Config) -> list[str]:
        return [fault.path for fault in plan_reload(_bare(old), _bare(new)).refused]

    assert refused(without, placed) == ["models.l"]
    assert refused(placed, without) == ["models.l"]
    assert refused(placed, wider) == ["models.l.slots"]


def _bare(config: Config) -> LoadedConfig:
    return LoadedConfig(config=config, specs=())


# The table


def settings_of(model: type, prefix: str) -> set[str]:
    assert issubclass(model, BaseModel)
    return {f"{prefix}.{name}" for name in model.model_fields}


def test_every_setting_has_a_row() -> None:
    """No new setting is left out, and no removed one stays."""
    whole = {"limits", "gpus"}
    sections = Config.model_fields.keys() - whole - {"models"}
    settings = {row for name in sections for row in settings_of(Config.model_fields[name].annotation, name)}  # type: ignore[arg-type]
    settings |= settings_of(ModelConfig, "models.NAME") - {"models.NAME.tools"}
    settings |= settings_of(ToolsConfig, "models.NAME.tools")
    assert set(EFFECTS) == settings | whole


def test_the_reference_prints_the_table() -> None:
    """Users read what the code does."""
    lines = REFERENCE.read_text().splitlines()
    shown: dict[str, Effect] = {}
    for effect in Effect:
        (row,) = [line for line in lines if line.startswith(f"| {effect} |")]
        shown |= {name.strip(" `"): effect for name in row.split("|")[2].split(",")}
    assert shown == dict(EFFECTS)


LLAMA = {"engine": "llama-server", "model": "org/name", "command": [sys.executable]}
VLLM = {**LLAMA, "engine": "vllm"}
LISTED = {**LLAMA, "devices": [0, 1]}
Models = Mapping[str, Document]


@pytest.fixture
def reloaded(tmp_path: Path) -> Callable[..., ReloadPlan]:
    """Plan reloads from one set of models to the next on a machine with two GPUs; return the plan of the last."""
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "NVIDIA H100", "memory_mib": 80_000} for n in range(2)]
    (tmp_path / "inventory.json").write_text(json.dumps({"devices": gpus}))

    def make(*steps: Models) -> ReloadPlan:
        plan, old = ReloadPlan(), None
        for models in steps:
            new = loaded({"gpus": {"inventory": "inventory.json"}, "models": dict(models)}, tmp_path)
            if old is not None:
                new = keep_parts(old, new)
                plan = plan_reload(old, new)
            old = new
        return plan

    return make


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"m": LLAMA}, {"m": {**LLAMA, "replicas": 2}}, ReloadPlan(resized=("m",))),
        ({"m": {**LLAMA, "replicas": 2}}, {"m": LLAMA}, ReloadPlan(resized=("m",))),
        ({"m": LISTED}, {"m": {**LISTED, "replicas": 2}}, ReloadPlan(resized=("m",))),
        ({"m": {**LISTED, "replicas": 2}}, {"m": LISTED}, ReloadPlan(resized=("m",))),
        ({"m": {**VLLM, "replicas": 3}}, {"m": {**VLLM, "replicas": 2}}, ReloadPlan(resized=("m",))),
        (
            {"m": {**VLLM, "replicas": 2}, "n": VLLM},
            {"m": {**VLLM, "replicas": 2}},
            ReloadPlan(removed=("n",), unchanged=("m",)),
        ),
        ({"m": LLAMA}, {"m": LISTED}, ReloadPlan(restarted=("m",))),
        ({"m": LISTED}, {"m": {**LISTED, "devices": [1]}}, ReloadPlan(restarted=("m",))),
        ({"m": LISTED}, {"m": {**LISTED, "devices": [0, "GPU-1"]}}, ReloadPlan(changed=("models.m.devices",))),
    ],
)
def test_the_devices_an_engine_has_cause_no_replacement(
    reloaded: Callable[..., ReloadPlan], before: Models, after: Models, expected: ReloadPlan
) -> None:
    """A start would choose otherwise now. Devices that the author lists are a setting."""
    assert reloaded(before, after) == expected


def test_an_engine_gives_memory_to_a_new_one_once_and_then_keeps_its_part(
    reloaded: Callable[..., ReloadPlan],
) -> None:
    """It is restarted once, since both have no room otherwise. It is not restarted when the other leaves or returns."""
    few: Models = {"m": VLLM, "n": VLLM}
    many: Models = {**few, "o": VLLM}
    assert reloaded(few, many) == ReloadPlan(added=("o",), restarted=("m", "n"))
    assert reloaded(few, many, few) == ReloadPlan(removed=("o",), unchanged=("m", "n"))
    assert reloaded(few, many, few, many) == ReloadPlan(added=("o",), unchanged=("m", "n"))


def test_a_part_of_the_memory_that_the_author_sets_or_removes_is_a_setting(
    reloaded: Callable[..., ReloadPlan],
) -> None:
    """The larger part counts. An engine that is restarted anyway gets the part that a start would give."""
    given = {**VLLM, "args": {"gpu_memory_utilization": 0.5}}
    pair: Models = {"m": {**VLLM, "replicas": 3}}
    assert reloaded({"m": given}, {"m": VLLM}).restarted == ("m",)
    assert reloaded(pair, {"m": {**given, "replicas": 3}}).restarted == ("m",)
    assert reloaded(pair, {"m": {**VLLM, "slots": 9}}, {"m": {**VLLM, "slots": 9}}).unchanged == ("m",)
    assert reloaded(pair, {"m": {**VLLM, "slots": 9}}, {"m": {**given, "slots": 9}}).restarted == ("m",)
