"""Every configuration that ``check`` accepts works: a covering array of configurations on scripted engines.

Every two values of its factors that go together are in a row. Refused pairs are listed, and each refusal is tried.
Source: specification, "Configuration files" and "Reload".
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from service.cli.commands.configuration_check import check
from service.errors import ConfigError
from tests.harness.configurations import MEANINGLESS, REFUSED, Pair, Row, pairs, pairs_of, rows
from tests.harness.laid_out import (
    KEYS,
    LANES,
    OTHER_PARAMS,
    OTHER_PROMPT,
    OTHER_REPLICAS,
    OTHER_SLOTS,
    PARAMS,
    LaidOut,
    change_last,
    ports_of,
)
from tests.harness.reloads import engines, post_reload, wait_settled
from tests.harness.service import Document, Service, serving
from tests.harness.stand_ins import NVML, NVML_LIBRARY, compiled, take_nvml
from tests.harness.waiting import LIMIT_S, is_alive, wait_for

LayOut = Callable[[Row], LaidOut]
Engine = tuple[int, float]  # its process, and when that began
SHARED = ("postgres", "cluster")
ROWS = rows()


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the library that reports two GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    compiled(NVML, folder / NVML_LIBRARY)
    (folder / "used").write_text("GPU-0 100\nGPU-1 100\n")
    return folder


@pytest.fixture
def lay_out(
    tmp_path: Path,
    free_ports: Callable[[int], int],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[LayOut]:
    """Return a function that lays out a row with its GPUs and its database; its attached servers end with the test."""
    with ExitStack() as stack:

        def lay(row: Row) -> LaidOut:
            if row.devices in {"gpus", "listed"}:
                nvml: Path = request.getfixturevalue("nvml")
                take_nvml(nvml / NVML_LIBRARY, monkeypatch)
                monkeypatch.setenv("STAND_IN_USED", str(nvml / "used"))
            database = request.getfixturevalue("postgres").new_database() if row.store in SHARED else ""
            return LaidOut(row, tmp_path / "s", free_ports(ports_of(row)), database, stack)

        yield lay


@contextmanager
def running(laid: LaidOut, limit_s: float = LIMIT_S, **server: object) -> Iterator[Service]:
    """Serve a laid-out row for a block; ``server`` adds to that section."""
    sections = laid.sections()
    with serving(
        laid.folder,
        laid.port,
        laid.models,
        laid.server() | server,
        key=laid.key,
        limit_s=limit_s,
        gpus=sections["gpus"],
        store=sections["store"],
    ) as service:
        yield service


def test_every_pair_of_values_is_in_a_row() -> None:
    """Refused pairs are in no row."""
    assert set().union(*map(pairs_of, ROWS)) == pairs()
    assert not any(row.has(pair) for row in ROWS for pair in (*REFUSED, MEANINGLESS))


@pytest.mark.system
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_configuration_works(row: Row, lay_out: LayOut) -> None:
    """It serves a job and a relayed request, takes a change that touches nothing else, and leaves nothing."""
    laid = lay_out(row)
    with running(laid) as service:
        check_keys(laid, service)
        check_workers(laid, service)
        check_work(laid, service, laid.names, topic=1)
        check_devices(laid, service)
        reloaded = check_reload(laid, service)
        check_work(laid, service, reloaded.names, topic=2, is_changed=reloaded.is_changed)
        check_lives(laid, service, reloaded)
        begun = {name: laid.lives(name, "begin") for name in laid.models}
    check_stopped(laid, begun)


def check_stopped(laid: LaidOut, begun: Mapping[str, list[int]]) -> None:
    """Every engine of ours was asked to end, and none has started since; attached servers go on."""
    for name, pids in begun.items():
        is_attached = laid.kind(name) == "attached"
        assert laid.lives(name, "begin") == pids
        assert sorted(laid.lives(name, "end")) == ([] if is_attached else sorted(pids)), name
    assert all(server.poll() is None for server in laid.attached.values())


def check_keys(laid: LaidOut, service: Service) -> None:
    """Keys count if there are any."""
    if laid.key is None:
        return
    job = laid.job(laid.names, topic=0)
    for name, status in {"reader": 403, "nobody": 401}.items():
        headers = {"Authorization": f"Bearer {KEYS.get(name, name)}"}
        assert httpx.post(f"{service.url}/v1/jobs", json=job, headers=headers).status_code == status
    headers = {"Authorization": f"Bearer {KEYS['reader']}"}
    assert httpx.get(f"{service.url}/v1/status", headers=headers).status_code == 200


def check_workers(laid: LaidOut, service: Service) -> None:
    """Each fixed model has its workers as configured; lanes are empty."""
    fixed = {
        f"{name}-{number}": name
        for name in laid.names
        if not laid.is_on_lanes(name)
        for number in range(laid.row.replicas + laid.row.spares)
    }
    settled = {"ready", "stopped", "draining"}

    def have_started() -> bool:
        found = {each: worker["state"] for each, worker in workers(service).items()}
        return set(found.values()) <= settled and "stopped" not in {found.get(each) for each in fixed}

    wait_for(have_started, "none is starting")
    told = workers(service)
    lanes = {f"lane-{number}" for number in range(LANES)} if any(map(laid.is_on_lanes, laid.names)) else set()
    assert told.keys() == fixed.keys() | lanes
    for worker, name in fixed.items():
        one = told[worker]
        state = "ready" if int(worker.rpartition("-")[2]) < laid.row.replicas else "draining"  # a spare
        assert (one["model"], one["engine"], one["state"]) == (name, laid.kind(name), state), one
        assert (one["incarnation"], one["slots"]["total"]) == (1, 2), one
        assert (one["kv"] is not None) is is_lent(laid, name), one


def is_lent(laid: LaidOut, name: str) -> bool:
    """Whether a model's KV cache is lent by tokens."""
    return laid.row.capacity == "tokens" or (laid.row.capacity == "default" and laid.kind(name) == "vllm")


def check_work(laid: LaidOut, service: Service, names: list[str], topic: int, *, is_changed: bool = False) -> None:
    """A job and a relayed request get each model's own answer; its engine received the params."""
    before = {name: len(laid.heard(name)) for name in names}
    job_id = service.post_job(laid.job(names, topic))
    assert service.wait_ended(job_id)["state"] == "completed"
    turns = service.get(f"/v1/jobs/{job_id}/conversations/q")["turns"]
    assert sorted((turn["round"], turn["agent"]) for turn in turns) == [
        (number, f"of-{name}") for number in range(2) for name in names
    ]
    for turn in turns:
        name = turn["agent"].removeprefix("of-")
        assert (turn["state"], turn["text"]) == ("completed", laid.answer(name, topic)), turn
        assert len(turn["attempts"]) == 1, turn
        called = [call["result"] for call in turn["tool_calls"]]
        assert called == ([] if laid.row.tools == "none" else [{"n": laid.number(name)}]), turn
        is_other = is_changed and laid.row.change == "args" and name == laid.names[-1]
        prompt = (OTHER_PROMPT if is_other else 7) * (1 + len(called))
        assert turn["usage"]["prompt_tokens"] == prompt, turn
    for name in names:
        said = {"role": "user", "content": f"I-am-{name} TOPIC-{topic}"}
        answer = service.http.post("/v1/chat/completions", json={"model": name, "messages": [said]})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == laid.answer(name, topic)
        check_heard(laid, name, laid.heard(name)[before[name] :], topic, is_changed=is_changed)


def check_heard(laid: LaidOut, name: str, heard: list[Document], topic: int, *, is_changed: bool) -> None:
    """An engine received only its own model's turns, once each, with the params that count."""
    calls = 1 if laid.row.tools == "none" else 2
    assert len(heard) == 2 * calls + 1, heard
    is_other = is_changed and laid.row.change == "params" and name == laid.names[-1]
    params = OTHER_PARAMS if is_other else PARAMS if laid.row.params == "some" else {}
    for request in heard:
        told = "\n".join(str(message["content"]) for message in request["messages"])
        assert f"I-am-{name}" in told
        assert f"TOPIC-{topic}" in told
        assert {key: value for key, value in request.items() if key in params} == params
        assert params or "temperature" not in request
    for request in heard[1 : 2 * calls : 2] if calls > 1 else ():
        result = request["messages"][-1]
        assert (result["role"], str(laid.number(name)) in result["content"]) == ("tool", True), result


def check_devices(laid: LaidOut, service: Service) -> None:
    """Each engine sees the devices that it may use, and none if the machine has none."""
    for worker in service.get("/v1/workers")["workers"]:
        if worker["pid"] is None:
            continue
        name = worker["model"]
        shown = psutil.Process(worker["pid"]).environ().get("CUDA_VISIBLE_DEVICES")
        assert (shown is None) is (shown_devices(laid, name) == 0), (worker, shown)
        assert shown is None or len(shown.split(",")) == shown_devices(laid, name), (worker, shown)


def shown_devices(laid: LaidOut, name: str) -> int:
    """Return how many devices an engine is shown; 0 if it gets no list."""
    if laid.row.devices == "none":
        return 0
    is_spread = laid.row.replicas == 1 and laid.kind(name) != "vllm" and not laid.is_on_lanes(name)
    if is_spread:
        return 2 if laid.row.devices == "listed" else 0
    return 1


@dataclass(frozen=True, kw_only=True)
class Reloaded:
    """The models after a reload, the engines it replaced, and whether it changed anything."""

    names: list[str]
    replaced: frozenset[str] = frozenset()
    is_changed: bool = False


def check_reload(laid: LaidOut, service: Service) -> Reloaded:
    """Make the row's reload: only changed parts are touched, and nothing if it needs a restart."""
    change, last = laid.row.change, laid.names[-1]
    before, document = engines(service), {}

    def edit(found: Document) -> None:
        change_last(laid, found)
        document.update(found)

    answer = post_reload(service, edit)
    told: dict[str, Any] = {key: value for key, value in answer.json().items() if value}
    if laid.row.placement == "lanes" and change != "nothing":
        assert (answer.status_code, told["code"]) == (409, "restart_needed"), told
        assert engines(service) == before
        return Reloaded(names=laid.names)
    assert answer.status_code == 200, answer.text
    new = f"m{len(laid.names)}"
    names = {"add": [*laid.names, new], "remove": laid.names[:-1]}.get(change, laid.names)
    replaced = {last} if change in {"params", "slots", "args"} else set()
    if engines_a_device(laid, document["models"]) > engines_a_device(laid, laid.models):
        replaced |= {name for name in laid.names if has_part(laid, name)}  # each gives way to the one that joins
    came_or_went = {"add": {"added": [new]}, "remove": {"removed": [last]}, "resize": {"resized": [last]}}
    parts = {**came_or_went.get(change, {}), "restarted": [name for name in laid.names if name in replaced]}
    touched = {name for part in parts.values() for name in part}
    parts["unchanged"] = [name for name in laid.names if name not in touched]
    assert told == {key: value for key, value in parts.items() if value}
    wait_settled(service)
    if change == "resize" and not replaced:
        wait_for(lambda: sum(each["pid"] is not None for each in workers(service).values()) != len(before), "one moved")
        check_resized(laid, before, engines(service))
    else:
        check_touched(laid, service, before, touched)
    return Reloaded(names=names, replaced=frozenset(replaced), is_changed=change != "nothing")


def has_part(laid: LaidOut, name: str) -> bool:
    """Whether a model's engines get a fraction of a device's memory if there are more of them than devices."""
    return laid.kind(name) == "vllm" and not laid.is_on_lanes(name) and laid.row.devices != "none"


def engines_a_device(laid: LaidOut, models: Mapping[str, Document]) -> int:
    """Return how many such engines there are on each of the two devices."""
    kept = [model for name, model in models.items() if has_part(laid, name)]
    count: int = sum(model.get("replicas", 1) + model.get("spares", 0) for model in kept)
    return max(1, -(-count // 2))


def check_touched(laid: LaidOut, service: Service, before: Mapping[str, Engine], touched: set[str]) -> None:
    """The engines of these models were replaced, added or ended; all others are the same processes."""
    after = engines(service)
    kept = {worker: engine for worker, engine in before.items() if worker.rpartition("-")[0] not in touched}
    gone = before.items() - kept.items()
    assert kept.items() <= after.items()
    assert not gone & after.items()
    wait_for(lambda: not any(is_alive(pid) for _, (pid, _) in gone), "what was replaced is gone")
    wait_for(lambda: "starting" not in {each["state"] for each in workers(service).values()}, "spares have started")
    for worker in service.get("/v1/workers")["workers"]:
        if worker["model"] in touched:
            is_other = laid.row.change == "slots" and worker["model"] == laid.names[-1]
            expected = OTHER_SLOTS if is_other else 2
            state = "draining" if "spare" in (worker["because"] or "") else "ready"
            assert (worker["state"], worker["slots"]["total"]) == (state, expected), worker


def check_resized(laid: LaidOut, before: Mapping[str, Engine], after: Mapping[str, Engine]) -> None:
    """One engine came or went, and all others are the same processes."""
    few, many = sorted((before, after), key=len)
    assert few.items() <= many.items()
    (worker,) = many.keys() - few.keys()
    assert (len(after) - len(before), worker.rpartition("-")[0]) == (3 - 2 * laid.row.replicas, laid.names[-1])


def check_lives(laid: LaidOut, service: Service, reloaded: Reloaded) -> None:
    """No unexpected engine has started, and only those that the change replaced have ended."""
    swaps = 0
    for name in laid.models:
        if laid.kind(name) == "attached":
            assert counted(laid, name) == (1, 0), name
        elif laid.is_on_lanes(name):
            swaps += counted(laid, name)[0]
        else:
            expected = expected_lives(laid, name, reloaded)
            wait_for(partial(has_lived, laid, name, expected), f"{name} has lived as expected: {expected}")
    if any(map(laid.is_on_lanes, laid.models)):
        assert sum(lane["swaps"] for lane in service.get("/v1/lanes")["lanes"]) == swaps


def counted(laid: LaidOut, name: str) -> tuple[int, int]:
    """Return how many of a model's engines have started, and how many were ended."""
    return len(laid.lives(name, "begin")), len(laid.lives(name, "end"))


def has_lived(laid: LaidOut, name: str, expected: tuple[int, int]) -> bool:
    """Whether so many have; a spare starts after the others."""
    return counted(laid, name) == expected


def expected_lives(laid: LaidOut, name: str, reloaded: Reloaded) -> tuple[int, int]:
    """Return how many engines of a fixed model have started, and how many were ended."""
    first = laid.row.replicas + laid.row.spares
    left = first if name in reloaded.names else 0
    if laid.row.change == "resize" and name == laid.names[-1]:
        left = OTHER_REPLICAS[laid.row.replicas] + laid.row.spares
    if name in reloaded.replaced:
        return first + left, first
    return max(first, left), first - min(first, left)


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_incompatible_values_are_refused(pair: Pair, lay_out: LayOut) -> None:
    """``check`` refuses them in words that name the key."""
    with pytest.raises(ConfigError) as refused:
        check_changed(lay_out(plain_row(pair)))
    assert REFUSED[pair] in str(refused.value)


@pytest.mark.parametrize("value", sorted({value for pair in REFUSED for value in pair}, key=str), ids=str)
def test_each_of_two_incompatible_values_is_accepted_alone(value: tuple[str, object], lay_out: LayOut) -> None:
    """So it is the two together that are refused."""
    check_changed(lay_out(plain_row((value,))))


def check_changed(laid: LaidOut) -> None:
    """Run ``check`` on a row's changed configuration, as a reload does."""
    document: Document = {"server": laid.server(), "models": laid.models, **laid.sections()}
    change_last(laid, document)
    path = laid.folder / "roundhouse.yaml"
    path.write_text(yaml.safe_dump(document))
    check(path, {"state_dir": laid.folder / "state"}, enable_mig=False)


def plain_row(values: tuple[tuple[str, object], ...]) -> Row:
    """Return the plainest row with these values."""
    return replace(Row(kind="vllm", beside="vllm"), **dict(values))  # type: ignore[arg-type]


def workers(service: Service) -> dict[str, Document]:
    return {worker["id"]: worker for worker in service.get("/v1/workers")["workers"]}
