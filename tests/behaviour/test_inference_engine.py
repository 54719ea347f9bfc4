"""``InferenceEngine`` on real processes of the scripted engine: one queue, lanes, faults, and its end."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from roundhouse import InferenceRequest
from roundhouse.inference.event_log import INFER_DONE, INFER_START, replay
from roundhouse.inference.failures import AgentExists, EngineClosed, InferenceFailed, NoLane, UnknownAgent
from service.errors import ConfigError
from tests.conftest import ENGINE_PROGRAM
from tests.harness.agents import LIMIT, engine, engine_for_agents, say
from tests.harness.service import recorded
from tests.harness.waiting import wait_until
from workers.errors import InvalidSpec
from workers.policy.placement import Placement
from workers.tools.calls import ToolLimits
from workers.tools.runner import PythonTools


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_a_game_of_three_agents_on_two_slots_runs_in_the_fair_order(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Turns end in a given order.

    The agent that waited longest starts next, and hears what was said before it was queued.
    """
    chat: list[str] = []
    heard: dict[str, list[list[str]]] = {"A1": [], "A2": [], "A3": []}
    log = tmp_path / "game_logger.jsonl"
    game = engine(free_ports(2), flags={"hold": r"HOLD=(\S+?)!"}, event_log=log)
    async with asyncio.timeout(LIMIT), game:
        for name in heard:
            await game.register_agent(agent_id=name, model_ckpt="town")

        async def play(name: str) -> None:
            for number in range(2):
                heard[name].append(list(chat))
                await say(game, name, f"{chat} HOLD={tmp_path}/{name}T{number}!")
                chat.append(f"{name}T{number}")

        async with asyncio.TaskGroup() as players:
            for name in heard:
                players.create_task(play(name))
            for ended, expected in zip(
                ("", "A1T0", "A2T0", "A3T0", "A1T1", "A3T1"),
                ("A1 A2", "A1 A2 A3", "A1 A2 A3 A1", "A1 A2 A3 A1 A2", "A1 A2 A3 A1 A2 A3", "A1 A2 A3 A1 A2 A3"),
                strict=True,
            ):
                if ended:
                    (tmp_path / ended).touch()
                    await wait_until(lambda ended=ended: ended in chat, f"{ended} is over")  # type: ignore[misc]
                await wait_until(partial(_started, log, expected), f"after {ended or 'nothing'}: {expected}")
            (tmp_path / "A2T1").touch()
    assert chat == ["A1T0", "A2T0", "A3T0", "A1T1", "A3T1", "A2T1"]
    assert heard["A1"] == [[], ["A1T0"]]
    assert heard["A2"] == [[], ["A1T0", "A2T0"]]
    assert heard["A3"] == [[], ["A1T0", "A2T0", "A3T0"]]


def _started(log: Path, agents: str) -> bool:
    """Whether runs of these agents have started, in this order and no other."""
    started = [event["agent"] for event in replay(log) if event["event"] == INFER_START]
    if len(started) > 1:
        started[:2] = sorted(started[:2])  # the two lanes are loaded side by side
    assert " ".join(started) in agents
    return " ".join(started) == agents


@pytest.mark.system
async def test_five_checkpoints_share_two_lanes(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """More agents than room: its own checkpoint answers each prompt once, and the events report it."""
    record, log = tmp_path / "asked.jsonl", tmp_path / "events.jsonl"
    flags = {"record": str(record), "echo": r"PROMPT-\w+"}
    game = engine(free_ports(2), flags=flags, event_log=log, system="SYSTEM")
    prompts = [(name, f"PROMPT-{name}{number}") for number in range(4) for name in "abcde"]
    async with asyncio.timeout(LIMIT), game:
        for name in "abcde":
            await game.register_agent(agent_id=name, model_ckpt=f"/models/{name}.gguf")
        answers = await game.batch_run(
            [InferenceRequest(agent_id=name, prompt=prompt, step="act", max_tokens=5) for name, prompt in prompts]
        )
    assert [answer.strip() for answer in answers] == [prompt for _, prompt in prompts]
    asked = [(request["model"], request["messages"]) for request in recorded(record)]
    assert {messages[0]["content"] for _, messages in asked} == {"SYSTEM"}
    contents = [(model, messages[1]["content"]) for model, messages in asked]
    assert sorted(each for each in contents if each[1] != "ping") == sorted(prompts)
    first_of: dict[int, str] = {}
    for entry in map(json.loads, record.read_text().splitlines()):
        first_of.setdefault(entry["pid"], entry["request"]["messages"][1]["content"])
    assert set(first_of.values()) == {"ping"}  # every engine reads the common segment before its first run, and once
    assert sum(content == "ping" for _, content in contents) == len(first_of) >= 5
    events = list(replay(log))
    assert [sum(event["event"] == kind for event in events) for kind in (INFER_START, INFER_DONE)] == [20, 20]
    assert {event["gpu"] for event in events} == {"cpu"}
    done = [event for event in events if event["event"] == INFER_DONE]
    assert all(event["tokens_out"] == 1 and event["latency_ms"] > 0 for event in done)


async def test_invalid_calls_are_refused_at_once(free_ports: Callable[[int], int], tmp_path: Path) -> None:
    """An unknown agent, a duplicate, an invalid lane or step, and a call after the end."""
    inventory = tmp_path / "gpus.yaml"
    inventory.write_text("devices: [{index: 0, uuid: GPU-0, name: T4}, {index: 1, uuid: GPU-0, name: T4}]")
    with pytest.raises(ConfigError, match=r"devices\[1\].uuid: GPU-0 is that of devices\[0\]"):
        engine(1, inventory=inventory)
    with pytest.raises(ConfigError, match="max_agents_per_gpu: 0 leaves no lane"):
        engine(1, count=0)
    game = engine(free_ports(1), count=1)
    before = processes()
    async with asyncio.timeout(LIMIT), game:
        with pytest.raises(UnknownAgent, match="'ghost'"):
            await say(game, "ghost")
        await game.register_agent(agent_id="a", model_ckpt="m")
        with pytest.raises(AgentExists, match="'a' is registered already"):
            await game.register_agent(agent_id="a", model_ckpt="m")
        other = engine_for_agents(engine="llama-server", command=["no-such-server"])
        with pytest.raises(InvalidSpec, match="no such program: 'no-such-server'"):
            await other.register_agent(agent_id="a", model_ckpt="m")
        await other.shutdown()
        with pytest.raises(NoLane, match="lane_hint: 7 is no lane"):
            await game.register_agent(agent_id="b", model_ckpt="m", lane_hint=7)
        with pytest.raises(ValueError, match="step: 'shout' is none"):
            await say(game, "a", step="shout")
        assert await say(game, "a")
    for call in (say(game, "a"), game.register_agent(agent_id="c", model_ckpt="m")):
        with pytest.raises(EngineClosed):
            await call
    await game.shutdown()  # a second time is nothing
    await wait_until(lambda: processes() <= before, "no process is left")


async def test_steps_show_and_hide_what_they_should(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Thoughts come with ``think`` alone; ``act`` is what is said aloud, and is empty for an agent that waits."""
    script = tmp_path / "script.json"
    text = "<thinking>I am the doctor.</thinking>Quiet. <answer>Hang him.</answer>"
    script.write_text(
        f'[{{"content": "{text}"}}, {{"content": "{text}"}}, {{"content": "{text}"}}, {{"content": "<wait/>"}}]'
    )
    game = engine(free_ports(1), count=1, flags={"script": str(script)})
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        assert await say(game, "a", step="think") == text
        assert await say(game, "a", step="plan") == "Quiet. <answer>Hang him.</answer>"
        assert await say(game, "a", step="act") == "Hang him."
        assert await say(game, "a", step="act") == ""


async def test_agents_of_one_checkpoint_sample_with_their_own_parameters(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """One agent is cool and one wild: a run's parameters override its agent's, which override the engine's."""
    record = tmp_path / "record"
    game = engine(free_ports(1), count=1, flags={"record": str(record)}, params={"temperature": 0.5, "top_k": 40})
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="cool", model_ckpt="m", params={"temperature": 0})
        await game.register_agent(agent_id="plain", model_ckpt="m")
        await say(game, "cool", params={"seed": 7})
        await say(game, "plain", params={"temperature": 2, "max_tokens": 1000})
        await game.batch_run(
            [{"agent_id": "cool", "prompt": "Who?", "step": "act", "max_tokens": 9, "params": {"temperature": 1}}]
        )
    names = ("temperature", "seed", "top_k", "max_tokens")
    assert [tuple(request.get(name) for name in names) for request in recorded(record)] == [
        (0, 7, 40, 9),
        (2, None, 40, 9),
        (1, None, 40, 9),
    ]


async def test_prompts_begin_alike_over_all_iterations_of_tools(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Each result ends with the rest of the tool budget: at the beginning it would make every prompt new."""
    script, record = tmp_path / "script.json", tmp_path / "record"
    call = {"tool_calls": [{"name": "look", "arguments": "{}"}]}
    script.write_text(json.dumps([{"content": "Read."}, call, call, {"content": "Done."}]))  # the first to the warm-up
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    flags = {"script": str(script), "record": str(record)}
    game = engine(
        free_ports(1), count=1, flags=flags, system="You are in a town.", tools=[look],
        tool_runner=PythonTools({"look": lambda: "a wall"}), tool_limits=ToolLimits(iterations=4),
    )  # fmt: skip
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        assert await say(game, "a") == "Done."
    asked = [request["messages"] for request in recorded(record) if "Who?" in json.dumps(request["messages"])]
    assert len(asked) == 3
    for earlier, later in pairwise(asked):
        assert later[: len(earlier)] == earlier
    assert "Tool iterations: 4" in asked[0][0]["content"]
    assert "2 tool iterations left" in asked[2][-1]["content"]


@pytest.mark.parametrize("emulates", [True, False])
async def test_an_answer_takes_at_least_the_emulated_latency(
    tmp_path: Path, free_ports: Callable[[int], int], *, emulates: bool
) -> None:
    """Specification, "Latency model": a step of 16 tokens takes 16 x 20 ms, and an answer of three tokens has one step.

    Without emulation it arrives when it is ready.
    """
    log = tmp_path / "events.jsonl"
    game = engine(
        free_ports(1), count=1, flags={"interval": 0.02, "prefill": 0.05}, event_log=log, emulate_latency=emulates
    )
    async with asyncio.timeout(LIMIT), game:
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt="m")
        await asyncio.gather(say(game, "a"), say(game, "b"))
        while not emulates and not any(_is_early(done) for done in _answers(log)):  # a busy machine may hold one back
            await say(game, "a")
    first, second, *_ = _answers(log)
    for done in _answers(log):
        assert done["predicted_ms"] - done["swap_ms"] > 250  # three tokens take 110
        assert not (emulates and _is_early(done))
    assert first["swap_ms"] > 15 * 2 * 20  # measured twice before the first run
    assert second["swap_ms"] == 0 or second["queue_ms"] > 0
    assert second["queue_ms"] >= first["latency_ms"] - first["swap_ms"] - 1


def _answers(log: Path) -> list[dict[str, Any]]:
    return [event for event in replay(log) if event["event"] == INFER_DONE]


def _is_early(done: dict[str, Any]) -> bool:
    return bool(done["latency_ms"] < done["predicted_ms"])


async def test_a_run_ends_at_its_deadline(free_ports: Callable[[int], int]) -> None:
    """The error names what it waited for."""
    async with asyncio.timeout(LIMIT), engine(free_ports(1), count=1, flags={"exit-at-once": 3}) as game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        with pytest.raises(InferenceFailed, match=r"no answer within 0\.5 s; m: lane-0 is") as failed:
            await say(game, "a", deadline_s=0.5)
        assert failed.value.reason == "deadline"


async def test_a_defect_fails_the_waiting_runs(
    free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller waits for an engine that has ended, neither in a waiting run nor in a later one."""
    real = Placement.decide

    def fail(self: Placement, lanes: Any, models: Any, now: float) -> Any:  # noqa: ANN401 - as it is
        if any(model.waiting for model in models):
            raise ZeroDivisionError("as it was told")
        return real(self, lanes, models, now)

    monkeypatch.setattr(Placement, "decide", fail)
    async with asyncio.timeout(LIMIT), engine(free_ports(1), count=1) as game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        for _ in range(2):
            with pytest.raises(EngineClosed, match="a defect of Roundhouse: ZeroDivisionError: as it was told"):
                await say(game, "a")


async def test_an_agent_stays_on_the_lane_of_its_cache(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It moved because another run was in its way; its pinned lane, free again, has no cache for it."""
    log = tmp_path / "events.jsonl"
    game = engine(free_ports(2), flags={"hold": r"HOLD=(\S+?)!"}, event_log=log)
    async with asyncio.timeout(LIMIT), game:
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt="m")
        held = [asyncio.create_task(say(game, name, f"HOLD={tmp_path}/{name}!")) for name in "ab"]
        await wait_until(lambda: len(list(replay(log))) == 2, "both lanes have a run")
        for name in "ab":
            (tmp_path / name).touch()
        await asyncio.gather(*held)
        for _ in range(3):
            await say(game, "b")
            await say(game, "a")
    lanes: dict[str, set[str]] = {"a": set(), "b": set()}
    for event in replay(log):
        lanes[event["agent"]].add(event["lane"])
    assert sorted(map(len, lanes.values())) == [1, 1]
    assert lanes["a"] != lanes["b"]


async def test_only_agents_at_work_on_a_lane_lose_it(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """One checkpoint is on two lanes: an agent that answers on the other one is unaffected, and gets no notice."""
    game = engine(free_ports(2), flags={"hold": r"HOLD=(\S+?)!", "echo": r"SAY=\w+"})
    told: list[dict[str, Any]] = []
    async with asyncio.timeout(LIMIT), game:

        async def follow() -> None:
            async for news in game.events():
                told.append(news)  # noqa: PERF401 - each is looked at as it comes

        following = asyncio.create_task(follow())
        for name in ("a", "b", "idle"):
            await game.register_agent(agent_id=name, model_ckpt="m")
        gates = {name: tmp_path / name for name in ("a", "b")}
        runs = {name: asyncio.create_task(say(game, name, f"HOLD={gate}! SAY={name}")) for name, gate in gates.items()}
        busy = partial(lambda: [each.current for each in game.status().lanes if each.current.slots_in_use])
        await wait_until(lambda: len(busy()) == 2, "each is on a lane of its own")
        lanes = game.status().last_lanes
        (worker,) = [each for each in busy() if each.id == lanes["b"]]
        assert worker.pid is not None
        psutil.Process(worker.pid).kill()
        await wait_until(lambda: any(each["event"] == "lane_dead" for each in told), "its end is told")
        for gate in gates.values():
            gate.touch()
        assert [await run for run in runs.values()] == ["SAY=a ", "SAY=b "]
    await following
    lost = {each["agent"] for each in told if each["event"] == "agent_disconnected"}
    pinned = game.status().models["m"].hint == lanes["b"]
    assert lost == ({"b", "idle"} if pinned else {"b"})


async def test_runs_of_one_agent_are_done_in_order(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Two slots are free; other agents use the second one meanwhile."""
    log = tmp_path / "events.jsonl"
    game = engine(free_ports(1), count=1, flags={"interval": 0.01}, slots=2, event_log=log)
    async with asyncio.timeout(LIMIT), game:
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt="m")
        await asyncio.gather(*(say(game, name, f"{number}") for number in range(5) for name in "ab"))
    events = list(replay(log))
    of_a = [event["event"] for event in events if event["agent"] == "a"]
    assert of_a == [INFER_START, INFER_DONE] * 5
    assert any(one["agent"] != other["agent"] and one["event"] == other["event"] for one, other in pairwise(events))


@pytest.mark.parametrize(("policy", "started"), [("fcfs", ["a1", "b", "a2"]), ("fair", ["a1", "a2", "b"])])
async def test_with_a_strict_order_no_run_passes_another(
    policy: Literal["fair", "fcfs"], started: list[str], tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """An older run waits for its model to load on one lane.

    Meanwhile no later run takes a free slot of another lane.
    """
    log = tmp_path / "events.jsonl"
    flags = {"hold": r"HOLD=(\S+?)!", "load": 0.7}
    game = engine(free_ports(2), slots=2, flags=flags, scheduler_policy=policy, event_log=log)
    before = processes()
    async with asyncio.timeout(LIMIT), game:
        for name, model in (("a1", "a"), ("a2", "a"), ("b", "b")):
            await game.register_agent(agent_id=name, model_ckpt=model)
        runs = [asyncio.create_task(say(game, "a1", f"HOLD={tmp_path}/go!"))]
        await wait_until(lambda: len(list(replay(log))) == 1, "it runs")
        runs.append(asyncio.create_task(say(game, "b")))
        await wait_until(lambda: sum(map(is_engine, processes() - before)) == 2, "the other model is being loaded")
        runs.append(asyncio.create_task(say(game, "a2")))
        await wait_until(lambda: len(list(replay(log))) == 5, "both have run")
        (tmp_path / "go").touch()
        await asyncio.gather(*runs)
    assert [event["agent"] for event in replay(log) if event["event"] == INFER_START] == started


def is_engine(pid: int) -> bool:
    try:
        return psutil.Process(pid).cmdline()[3:4] == [str(ENGINE_PROGRAM)]  # a guardian has it further behind
    except psutil.Error:
        return False


@pytest.mark.system
async def test_a_prompt_that_kills_every_engine_is_given_up(free_ports: Callable[[int], int]) -> None:
    """Its caller gets the reason, and the others' runs go on."""
    game = engine(free_ports(2), flags={"die-on": "DEADLY"})
    async with asyncio.timeout(2 * LIMIT), game:
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt="m")
        deadly = asyncio.create_task(say(game, "a", "DEADLY"))
        assert await say(game, "b")
        with pytest.raises(InferenceFailed) as caught:
            await deadly
        assert caught.value.reason == "poisoned"
        assert await say(game, "a")


async def test_a_shutdown_ends_waiting_and_running_runs(free_ports: Callable[[int], int]) -> None:
    """Every caller gets an answer: none hangs."""
    game = engine(free_ports(1), count=1, flags={"interval": 0.5, "tokens": 100})
    before = processes()
    async with asyncio.timeout(LIMIT):
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt=name)
        runs = [asyncio.create_task(say(game, name)) for name in "ab"]
        await wait_until(lambda: any(map(is_engine, processes() - before)), "an engine is there")
        await game.shutdown()
        ended = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(each) for each in ended] == [EngineClosed, EngineClosed]
    await wait_until(lambda: processes() <= before, "no process is left")
