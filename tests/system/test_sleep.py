"""Engines that sleep while another model has their lane, on the scripted vLLM: the requests that they get, and when."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.behaviour.test_lanes import lanes_at, lanes_of, talk, turns_of
from tests.harness.agents import engine_for_agents
from tests.harness.service import Document, Service, serving
from tests.harness.sleeping import BEGIN, COMMAND, END, SLEEP, WAKE, Told
from tests.harness.waiting import LIMIT_S, is_alive, wait_for, wait_until

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
    """Have a model speak once, in one attempt; return the turn."""
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


def test_two_models_alternate_on_a_lane_and_each_keeps_its_engine(service: Service, sleepers: Sleepers) -> None:
    """One sleeps before the other starts or wakes; no turn suffers, and the engines are those of the start."""
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


def test_an_engine_that_dies_asleep_is_started_when_a_turn_needs_it(service: Service, sleepers: Sleepers) -> None:
    """Not before; the model that has the lane meanwhile goes on with its turns."""
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
def test_an_engine_that_does_not_wake_is_started_again(
    service: Service, sleepers: Sleepers, model: str, other: str, do: str
) -> None:
    """It may report the failure or stay silent for ``start_s``: the turn is not charged."""
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
    """An operator stops it: both engines of a lane end."""
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


# For agents from Python


async def test_agents_get_no_notice_of_an_engine_that_dies_asleep(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The lane belongs to another, which goes on; the next run of its own agent gets another engine."""
    told = Told(tmp_path)
    port = free_ports(1)
    game = engine_for_agents(
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
