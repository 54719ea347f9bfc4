"""Engines that sleep while another model has their lane, on the scripted vLLM: what they are asked, and when."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from service import InferenceEngine
from tests.behaviour.test_lanes import lanes_at, lanes_of, talk, turns_of
from tests.faults.test_worker import ask
from tests.harness.ports import find_ports
from tests.harness.programs import PROGRAMS
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import LIMIT_S, is_alive, wait_for, wait_until
from tests.harness.working import QUICK
from workers import EngineKind, WorkerSpec, WorkerTimeouts
from workers.devices.device import Gpu
from workers.devices.device_health import DeviceHealth
from workers.devices.layout import LayoutPolicy
from workers.devices.layout import lanes_of as lay_out
from workers.devices.memory import DeviceMemory
from workers.errors import GroupMissing
from workers.fleet import Fleet
from workers.lanes import sleep
from workers.lanes.lane_spec import on_lane
from workers.policy.placement import Waiting
from workers.policy.weight_update import UpdateState
from workers.policy.weights import WeightsPolicy
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker
from workers.weights.group import GroupRequest, GroupState
from workers.weights.update import Tensor, UpdateRequest

COMMAND = (sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py"))
SLEEP, WAKE, BEGIN, END = "/sleep?level=1", "/wake_up", "begin", "SIGTERM"
SWAPS = {SLEEP, WAKE, BEGIN, END}
Asked = list[tuple[str, str]]  # of which model's engine, and what


class Told:
    """What scripted engines were asked, in the order of it, and the files that make them misbehave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "asked.jsonl"

    def args(self, model: str, **flags: object) -> Document:
        return {"record": str(self.file), "fault-file": str(self.folder / f"{model}.fault"), **flags}

    def checkpoint(self, name: str) -> Path:
        """Return the folder of a checkpoint that takes a MiB, as far as its files tell."""
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        folder = self.folder / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        return folder

    def misbehave(self, model: str, phase: str, do: str) -> None:
        half = self.folder / f"{model}.half"
        half.write_text(json.dumps([{"port": 0, "phase": phase, "do": do}]))
        half.replace(self.folder / f"{model}.fault")

    def behave(self, model: str) -> None:
        (self.folder / f"{model}.fault").unlink()

    def all(self, *models: str) -> list[Document]:
        lines = map(json.loads, self.file.read_text().splitlines()) if self.file.exists() else ()
        return [line for line in lines if line["model"] in models or not models]

    def swaps(self, *models: str) -> Asked:
        """Return the starts, sleeps, wakes and ends of engines."""
        return [(line["model"], line["asked"]) for line in self.all(*models) if line["asked"] in SWAPS]

    def pids(self, model: str) -> list[int]:
        """Return the processes that were a model's engine, in their order."""
        return list(dict.fromkeys(line["pid"] for line in self.all(model)))

    def check_sleepers(self, *models: str) -> None:
        """Return if no engine was asked for anything while it slept but to wake."""
        assert {line["asked"] for line in self.all(*models) if line["asleep"]} <= {WAKE, END}


# In the service: ``service`` is shared, and each test has two models of its own


class Sleepers(Told):
    """A service with one lane, and pairs of models that sleep."""

    PAIRS = ("ada bob", "cid dot", "eve fay", "gus hal")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.models = {name: self.model(name) for pair in self.PAIRS for name in pair.split()}
        self.models["gus"]["timeouts"] = {"start_s": 1.0}

    def model(self, name: str) -> Document:
        return {
            "engine": "vllm",
            "placement": "lanes",
            "model": str(self.checkpoint(f"weights-{name}")),
            "command": list(COMMAND),
            "args": self.args(name, **{"enable-sleep-mode": True}),
            "slots": 1,
            "bios": {"enabled": False},
            "repetition": {"lines": None},
            "restart": {"initial_s": 0.05, "max_s": 0.1, "failures": 3},
        }


def say(service: Service, model: str) -> Document:
    """Have a model speak once, at the first try; return the turn."""
    job = service.post_job(talk([model], name=model, rounds=1, talks=1))
    assert service.wait_ended(job)["state"] == "completed"
    (turn,) = turns_of(service, job, 1)
    assert (turn["text"], len(turn["attempts"])) == (f"weights-{model}", 1)
    return turn


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Sleepers:
    return Sleepers(tmp_path_factory.mktemp("sleep"))


@pytest.fixture(scope="module")
def service(sleepers: Sleepers, free_ports: Callable[[int], int]) -> Iterator[Service]:
    gpus = lanes_at(free_ports(1), 1)
    with serving(sleepers.folder / "s", free_ports(1), sleepers.models, gpus=gpus) as running:
        yield running


def test_two_models_take_turns_on_a_lane_and_each_keeps_its_engine(service: Service, sleepers: Sleepers) -> None:
    """One sleeps before the other begins or wakes; no turn pays for it, and the engines are those of the start."""
    job = service.post_job(talk(["ada", "bob"], rounds=3, talks=2))
    assert service.wait_ended(job)["state"] == "completed"
    for model in ("ada", "bob", "ada"):
        say(service, model)
    turns = turns_of(service, job, 2)
    assert len(turns) == 12
    assert {(len(turn["attempts"]), turn["text"]) for turn in turns} == {(1, "weights-ada"), (1, "weights-bob")}
    places = {(turn["agent"], turn["incarnation"]) for turn in turns}
    places |= {(f"of-{model}", say(service, model)["incarnation"]) for model in ("bob", "ada")}
    assert len(places) == 2
    assert len({incarnation for _, incarnation in places}) == 2
    assert [len(sleepers.pids(model)) for model in ("ada", "bob")] == [1, 1]
    swaps = sleepers.swaps("ada", "bob")
    assert len(swaps) >= 9
    first, second = swaps[0][0], swaps[2][0]
    lives = [(first, BEGIN), (first, SLEEP), (second, BEGIN), (second, SLEEP), (first, WAKE), (first, SLEEP)]
    lives += [(second, WAKE), (second, SLEEP), (first, WAKE), (first, SLEEP)] * len(swaps)
    assert swaps == lives[: len(swaps)]
    sleepers.check_sleepers("ada", "bob")


def test_an_engine_that_dies_asleep_is_started_when_a_turn_wants_it(service: Service, sleepers: Sleepers) -> None:
    """Not before, and the model that has the lane meanwhile goes on with its turns."""
    before = say(service, "cid")["incarnation"]
    say(service, "dot")
    (pid,) = sleepers.pids("cid")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "its engine has ended while it slept" in service.log(), "its end is known")
    say(service, "dot")
    assert sleepers.swaps("cid") == [("cid", BEGIN), ("cid", SLEEP)]
    assert say(service, "cid")["incarnation"] > before
    assert sleepers.swaps("cid", "dot")[-2:] == [("dot", SLEEP), ("cid", BEGIN)]
    assert len(sleepers.pids("dot")) == 1
    assert say(service, "dot")["attempts"]
    sleepers.check_sleepers("cid", "dot")


@pytest.mark.parametrize(("model", "other", "do"), [("eve", "fay", "fail"), ("gus", "hal", "stall")])
def test_an_engine_that_does_not_wake_is_started_anew(
    service: Service, sleepers: Sleepers, model: str, other: str, do: str
) -> None:
    """Whether it answers so or not at all within ``start_s``: the turn is charged with nothing."""
    say(service, model)
    say(service, other)
    sleepers.misbehave(model, "wake", do)
    turn = say(service, model)
    assert sleepers.swaps(model)[-3:] == [(model, WAKE), (model, END), (model, BEGIN)]
    first, second = sleepers.pids(model)
    assert not is_alive(first)
    assert service.get("/v1/workers/lane-0")["pid"] == second
    assert turn["incarnation"] == service.get("/v1/workers/lane-0")["incarnation"]
    assert lanes_of(service)[0]["barred"] == []
    sleepers.check_sleepers(model, other)


def test_a_stop_of_the_service_ends_engines_that_sleep(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """As an operator asks for it: both engines of a lane are gone."""
    told = Sleepers(tmp_path)
    with serving(tmp_path / "s", free_ports(1), told.models, gpus=lanes_at(free_ports(1), 1)) as service:
        say(service, "ada")
        say(service, "bob")
        (asleep,), (awake,) = told.pids("ada"), told.pids("bob")
        assert [is_alive(pid) for pid in (asleep, awake)] == [True, True]
        assert service.stop() == 0, service.log()
        assert [is_alive(pid) for pid in (asleep, awake)] == [False, False]
    assert told.swaps() == [("ada", BEGIN), ("ada", SLEEP), ("bob", BEGIN), *told.swaps()[3:]]
    assert sorted(told.swaps()[3:]) == [("ada", END), ("bob", END)]


# In the workers: what the service adds to it is above


class Lanes(Told):
    """A fleet with models on lanes, and turns that want them."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        super().__init__(folder)
        self.fleet = fleet
        self.lane, *_ = self.all_lanes = list(fleet.lanes.lanes)
        self.workers = self.lane.workers
        self._turns = 0

    def note(self, model: str) -> None:
        """Have a turn wait for a model."""
        self._turns += 1
        self.fleet.lanes.note_waiting({model: Waiting(count=1, first=(self._turns,))})

    async def want(self, model: str) -> SupervisedWorker:
        """Return a model's worker once a turn that waits for it could start."""
        self.note(model)

        def ready() -> list[SupervisedWorker]:
            workers = [lane.workers[model] for lane in self.all_lanes]
            return [worker for worker in workers if worker.state is WorkerState.READY]

        await wait_until(ready, f"{model} takes turns")
        self.fleet.lanes.note_waiting({})
        return ready()[0]

    async def say(self, model: str) -> str:
        return (await ask(await self.want(model)))[1]

    async def wait_asked(self, model: str, asked: str) -> None:
        await wait_until(lambda: (self.swaps(model) or [("", "")])[-1] == (model, asked), f"{model} is asked: {asked}")

    async def wait_asleep(self, model: str) -> None:
        worker = self.workers[model]
        await wait_until(lambda: worker.holds == {Hold.ASLEEP}, f"{model} sleeps")


@asynccontextmanager
async def lanes(
    tmp_path: Path,
    models: str = "ab",
    *,
    count: int = 1,
    gpu: Gpu | None = None,
    health: DeviceHealth | None = None,
    listens: bool = True,
    **changes: object,
) -> AsyncIterator[Lanes]:
    """Run models on the lanes of one device; ``listens`` says whether on sockets."""
    told = Told(tmp_path)
    port = find_ports(count)
    policy = LayoutPolicy(max_agents_per_gpu=count, ports=(port, port + count - 1))
    specs = [
        WorkerSpec(
            engine=EngineKind.VLLM,
            name=name,
            model=str(told.checkpoint(f"weights-{name}")),
            command=COMMAND,
            timeouts=WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S),
            **{"args": told.args(name, **{"enable-sleep-mode": True}), "restart": QUICK, **changes},  # type: ignore[arg-type]
        )
        for name in models
    ]
    on_lanes = [
        on_lane(spec, lane, tmp_path / f"{lane.id}{spec.name}.sock" if listens else None)
        for lane in lay_out([gpu] if gpu is not None else [], policy, host_memory_mib=1000)
        for spec in specs
    ]
    fleet = Fleet(on_lanes, os.environ, tmp_path / "state", health=health)
    with anyio.fail_after(3 * LIMIT_S):
        async with fleet.running():
            yield Lanes(tmp_path, fleet)


@pytest.mark.parametrize("do", ["fail", "absent", "end", "stall"])
async def test_an_engine_that_does_not_sleep_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str) -> None:
    """And the other model has the lane all the same; at the next try it may sleep."""
    monkeypatch.setattr(sleep, "SLEEP_S", 0.2)
    async with lanes(tmp_path) as told:
        assert await told.say("a") == "weights-a"
        told.misbehave("a", "sleep", do)
        assert await told.say("b") == "weights-b"
        ends = [] if do == "end" else [("a", END)]
        assert told.swaps() == [("a", BEGIN), ("a", SLEEP), *ends, ("b", BEGIN)]
        told.behave("a")
        monkeypatch.setattr(sleep, "SLEEP_S", LIMIT_S)
        assert [await told.say(model) for model in "ab"] == ["weights-a", "weights-b"]
        assert told.swaps("a")[-2:] == [("a", BEGIN), ("a", SLEEP)]
        await told.wait_asleep("a")
        told.check_sleepers()


async def test_an_update_of_a_model_that_sleeps_is_applied_at_its_load(tmp_path: Path) -> None:
    """Its engine is started anew, and takes no turn before it has the new weights."""
    async with lanes(tmp_path) as told:
        assert await told.say("a") == "weights-a"
        await told.want("b")
        await told.wait_asleep("a")
        checkpoint = str(told.checkpoint("one"))
        update = await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, [])
        assert await told.say("a") == "one"
        assert told.swaps("a") == [("a", BEGIN), ("a", SLEEP), ("a", END), ("a", BEGIN)]
        assert [await told.say(model) for model in "ba"] == ["weights-b", "one"]
        assert told.swaps("a")[-2:] == [("a", SLEEP), ("a", WAKE)]  # with those that it has
        told.check_sleepers()


async def test_an_engine_that_slept_has_the_adapters_that_its_model_has_by_now(tmp_path: Path) -> None:
    """One that came while it slept, or went: it is started with what is current; else it wakes with what it has."""
    path = {"poet": str(tmp_path / "poet")}
    async with lanes(tmp_path, max_adapters=2) as told:
        await told.want("a")
        for adapters, last in ((path, BEGIN), (path, WAKE), ({}, BEGIN)):
            await told.want("b")
            await told.wait_asleep("a")
            told.workers["a"].want_adapters(adapters)
            worker = await told.want("a")
            assert (worker.adapters.loaded, told.swaps("a")[-1]) == (adapters, ("a", last))
        assert [asked for _, asked in told.swaps("a")].count(END) == 2
        told.check_sleepers()


HOST_MIB = sleep.HOST_RESERVE_MIB + 1  # free: the reserve, and what a checkpoint takes here


@pytest.mark.parametrize(
    ("flags", "lacks", "sleeps"),
    [
        ({"enable-sleep-mode": True}, "", True),
        ({"enable_sleep_mode": True}, "", True),
        ({"enable-sleep-mode": True}, "room", False),
        ({"enable-sleep-mode": True}, "socket", False),
        ({"enable-sleep-mode": True}, "files", False),
        ({"enable-sleep-mode": False}, "", False),
        ({}, "", False),
    ],
)
async def test_an_engine_sleeps_only_where_it_may_and_the_host_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: Document, lacks: str, *, sleeps: bool
) -> None:
    """Otherwise it is ended, and started when its next turn comes."""
    free = SimpleNamespace(available=HOST_MIB * sleep.MIB - (lacks == "room"))
    monkeypatch.setattr(sleep, "psutil", SimpleNamespace(virtual_memory=lambda: free))
    async with lanes(tmp_path, args=Told(tmp_path).args("any", **flags), listens=lacks != "socket") as told:
        if lacks == "files":
            for name in "ab":
                (tmp_path / f"weights-{name}" / "model.safetensors").unlink()
        assert [await told.say(model) for model in "aba"] == ["weights-a", "weights-b", "weights-a"]
        down, up = (SLEEP, WAKE) if sleeps else (END, BEGIN)
        assert told.swaps() == [("a", BEGIN), ("a", down), ("b", BEGIN), ("b", down), ("a", up)]


async def test_what_comes_while_an_engine_wakes_is_not_passed_over(tmp_path: Path) -> None:
    """An update, and then an adapter: it wakes with what was current before, and is started anew."""
    async with lanes(tmp_path, max_adapters=2) as told:
        worker = await told.want("a")
        checkpoint = str(told.checkpoint("one"))
        for change in ("weights", "adapter"):
            await told.want("b")
            await told.wait_asleep("a")
            told.misbehave("a", "wake", "hold")
            told.note("a")
            await told.wait_asked("a", WAKE)
            if change == "weights":
                await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
            else:
                worker.want_adapters({"poet": str(tmp_path / "poet")})
            told.behave("a")
            assert await told.say("a") == "one"
            assert told.swaps("a")[-3:] == [("a", WAKE), ("a", END), ("a", BEGIN)], change
        assert set(worker.adapters.loaded) == {"poet"}


async def test_an_engine_that_falls_asleep_is_told_of_no_update(tmp_path: Path) -> None:
    """Its model's next engine has the new weights."""
    async with lanes(tmp_path) as told:
        await told.want("a")
        told.misbehave("a", "sleep", "hold")
        told.note("b")
        await told.wait_asked("a", SLEEP)
        checkpoint = str(told.checkpoint("one"))
        update = await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, [])
        told.behave("a")
        assert [await told.say(model) for model in "ba"] == ["weights-b", "one"]
        assert told.swaps("a")[-2:] == [("a", END), ("a", BEGIN)]
        told.check_sleepers()


async def test_an_engine_whose_weights_are_behind_does_not_sleep(tmp_path: Path) -> None:
    """Nor while it is being brought to them: it would have to be started anew."""
    async with lanes(tmp_path) as told:
        checkpoint = str(told.checkpoint("one"))
        await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
        told.misbehave("a", "receive", "hold")
        told.note("a")
        await wait_until(lambda: told.workers["a"].holds == {Hold.STALE_WEIGHTS}, "it is behind")
        await wait_until(lambda: told.workers["a"].is_serving, "and there")
        assert await told.say("b") == "weights-b"
        assert told.swaps("a") == [("a", BEGIN), ("a", END)]
        told.behave("a")
        assert await told.say("a") == "one"


async def test_a_trainers_group_has_no_engine_that_sleeps(tmp_path: Path) -> None:
    """It would wait for that one's part until its time is over: the group has to be made again without it."""
    policy = WeightsPolicy(receive_s=5, keep=False)
    group = GroupRequest(backend=policy.backend, address="127.0.0.1", port=1, timeout_s=LIMIT_S)
    tensors = UpdateRequest(tensors=(Tensor(name="w", dtype="float32", shape=(1,)),))
    async with lanes(tmp_path, "ac", count=2, weights=policy) as told:
        weights = told.fleet.weights["a"]
        told.fleet.lanes.note_waiting({"a": Waiting(count=9, first=(1, 2))})  # of more turns than one has slots
        there = [lane.workers["a"] for lane in told.all_lanes]
        await wait_until(lambda: all(worker.state is WorkerState.READY for worker in there), "it is on both lanes")
        made = await weights.init(group)
        await wait_until(lambda: made.state is GroupState.READY, "all have joined")
        other = await told.want("c")
        sleeper = [lane.current for lane in told.all_lanes].index(other)
        await wait_until(lambda: there[sleeper].holds == {Hold.ASLEEP}, "one sleeps")
        with pytest.raises(GroupMissing, match=f"lane-{sleeper} sleeps"):
            await weights.update(tensors)
        made = await weights.init(group)
        await wait_until(lambda: made.state is GroupState.READY, "the other has joined")
        update = await weights.update(tensors)
        assert await weights.wait_over(update.number, LIMIT_S)
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, [f"lane-{1 - sleeper}"])
        told.check_sleepers()


async def test_every_engine_of_a_lane_has_a_number_of_its_own(tmp_path: Path) -> None:
    """It is told by it in transcripts, incidents and logs; who wakes keeps its own."""
    async with lanes(tmp_path, "abc") as told:
        numbers = [(await told.want(model)).incarnation for model in "abacbd"[:5]]
        assert numbers == [1, 2, 1, 3, 2]


async def test_an_engine_that_fails_asleep_for_the_last_time_stays_down(tmp_path: Path) -> None:
    """Where one failure is enough to give up, the one more try is a turn's to ask for."""
    restart = replace(QUICK, failures=1, retry_s=2 * LIMIT_S)
    async with lanes(tmp_path, restart=restart) as told:
        await told.want("a")
        await told.want("b")
        await told.wait_asleep("a")
        os.kill(told.pids("a")[0], signal.SIGTERM)  # it ends by itself: no signal that killed it explains that
        await wait_until(lambda: told.workers["a"].state is WorkerState.STOPPED, "it is not to come back")
        assert await told.say("b") == "weights-b"
        assert told.swaps("a") == [("a", BEGIN), ("a", SLEEP), ("a", END)]
        assert await told.say("a") == "weights-a"
        assert told.swaps("a")[-1] == ("a", BEGIN)


async def test_an_engine_that_dies_before_it_sleeps_leaves_its_lane_to_the_next(tmp_path: Path) -> None:
    """It waits for a neighbour's start meanwhile, and so does the other model's wake: that is asked for once."""
    async with lanes(tmp_path, "abc", count=2) as told:
        told.fleet.lanes.hints |= {"a": "lane-0", "b": "lane-0", "c": "lane-1"}
        neighbour = await told.want("c")
        await told.want("b")
        first = await told.want("a")
        assert [lane.current.spec.name for lane in told.all_lanes] == ["a", "c"]
        told.misbehave("c", "begin", "stall")
        os.kill(told.pids("c")[0], signal.SIGKILL)
        await wait_until(lambda: told.swaps("c") == [("c", BEGIN)] * 2, "the neighbour starts again")
        told.note("b")
        await wait_until(lambda: told.lane.is_turning, "it is to sleep, and waits for the neighbour")
        os.kill(told.pids("a")[0], signal.SIGKILL)
        await wait_until(lambda: told.lane.current.spec.name == "b", "the other has its lane")
        told.misbehave("b", "wake", "hold")
        told.behave("c")
        await told.wait_asked("b", WAKE)
        assert neighbour.state is WorkerState.READY
        told.behave("b")
        await told.want("b")
        assert (await told.want("a")) is first
        assert told.swaps("a", "b")[3:] == [("b", WAKE), ("b", SLEEP), ("a", BEGIN)]


# On a device whose memory can be looked at


class Card:
    """A GPU's memory as its driver would tell it: what engines that are awake take, and what is ``held`` beside."""

    UUID = "GPU-0"
    WEIGHTS_MIB = 4

    def __init__(self, folder: Path) -> None:
        self.told = Told(folder)
        self.held_mib = 0
        self.looks = 0

    def memory(self) -> dict[str, DeviceMemory]:
        self.looks += 1
        awake = {model for model, asked in dict(self.told.swaps()).items() if asked in {BEGIN, WAKE}}
        used_mib = 10 + self.WEIGHTS_MIB * len(awake) + self.held_mib
        return {self.UUID: DeviceMemory(total_mib=16_000, used_mib=used_mib)}

    def faults(self) -> Sequence[tuple[str, int]]:
        return ()

    def close(self) -> None:
        return


@asynccontextmanager
async def on_card(tmp_path: Path) -> AsyncIterator[tuple[Lanes, Card]]:
    card = Card(tmp_path)
    gpu = Gpu(index=0, uuid=Card.UUID, name="T4", memory_mib=16_000)
    async with lanes(tmp_path, gpu=gpu, health=DeviceHealth(card)) as told:
        for name in told.workers:
            os.truncate(tmp_path / f"weights-{name}" / "model.safetensors", Card.WEIGHTS_MIB * sleep.MIB)
        yield told, card


async def test_nothing_is_loaded_before_the_memory_of_what_sleeps_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may answer before its device has all of it back."""
    monkeypatch.setattr(sleep, "FREE_S", 3 * LIMIT_S)
    async with on_card(tmp_path) as (told, card):
        assert await told.say("a") == "weights-a"
        told.misbehave("a", "sleep", "hold")
        told.note("b")
        await told.wait_asked("a", SLEEP)
        card.held_mib = Card.WEIGHTS_MIB
        told.behave("a")
        seen = card.looks
        await wait_until(lambda: card.looks > seen + 2, "it has been looked at")
        assert told.swaps("b") == []
        card.held_mib = 0
        assert await told.say("b") == "weights-b"


async def test_memory_that_does_not_come_free_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may use the device as well: the next engine will say whether there is room."""
    monkeypatch.setattr(sleep, "FREE_S", 0.2)
    async with on_card(tmp_path) as (told, card):
        await told.want("a")
        told.misbehave("a", "sleep", "hold")
        told.note("b")
        await told.wait_asked("a", SLEEP)
        card.held_mib = 100
        told.behave("a")
        assert await told.say("b") == "weights-b"


async def test_swaps_that_follow_one_another_quickly_wait_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was used before a sleep is looked at then: the last look may be older than the engine."""
    monkeypatch.setattr(sleep, "FREE_S", 3 * LIMIT_S)
    async with on_card(tmp_path) as (told, _):
        assert [await told.say(model) for model in "abab"] == ["weights-a", "weights-b"] * 2
        assert [len(told.pids(model)) for model in "ab"] == [1, 1]


# For agents from Python


async def test_agents_are_told_nothing_of_an_engine_that_dies_asleep(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The lane is another's, and goes on; the next run of its own agent has another engine."""
    told = Told(tmp_path)
    port = free_ports(1)
    game = InferenceEngine(
        command=COMMAND,
        args=told.args("any", **{"enable-sleep-mode": True}),
        max_agents_per_gpu=1,
        ports=(port, port),
        state_dir=tmp_path / "state",
    )
    events: list[Document] = []
    async with asyncio.timeout(3 * LIMIT_S), game:
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt=told.checkpoint(f"weights-{name}"))

        async def say(agent: str) -> str:
            return await game.run(agent, "Who?", step="plan", max_tokens=9)

        async def follow() -> None:
            events.extend([dict(event) async for event in game.events()])

        following = asyncio.create_task(follow())
        assert [await say(agent) for agent in "aba"] == ["weights-a", "weights-b", "weights-a"]
        assert [len(told.pids(f"weights-{name}")) for name in "ab"] == [1, 1]
        (pid,) = told.pids("weights-b")
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not is_alive(pid), "it is dead")
        assert [await say(agent) for agent in "ab"] == ["weights-a", "weights-b"]
        assert [len(told.pids(f"weights-{name}")) for name in "ab"] == [1, 2]
    await following
    assert [(event["event"], event["model"]) for event in events] == [("swap", f"weights-{name}") for name in "abab"]
    told.check_sleepers()
