"""Layout A of ``InferenceEngine``: checkpoints that are adapters of one base share a server, and its slots."""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from service import InferenceEngine
from service.inference.event_log import INFER_DONE, INFER_START, replay
from service.inference.failures import NoLane
from tests.behaviour.test_inference_engine import LIMIT, say
from tests.conftest import ENGINE_PROGRAM
from tests.engines.adapters import write_gguf_adapter, write_peft_adapter
from tests.harness.programs import PROGRAMS
from tests.harness.waiting import wait_until
from workers.errors import InvalidSpec
from workers.states import WorkerState

LLAMA: Final = (sys.executable, "-I", "-S", str(ENGINE_PROGRAM))
VLLM: Final = (sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py"))
HOLD: Final = {"hold": r"HOLD=(\S+?)!"}
WAY_OUT: Final = "give layout B, or an adapter of that base"


def llama(ports: Callable[[int], int], *, lanes: int = 1, count: int = 3, **fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return an engine of layout A, with so many lanes of so many checkpoints."""
    first = ports(lanes)
    given = {"engine": "llama-server", "command": LLAMA, "layout": "A", **fields}
    return InferenceEngine(max_agents_per_gpu=count, ports=(first, first + lanes - 1), **given)


def vllm(ports: Callable[[int], int], folder: Path, **fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return the same of vLLM, which notes in ``record`` what it is told, and suffers what ``faults`` says."""
    flags = {"record": str(folder / "record"), "fault-file": str(folder / "faults")}
    return llama(ports, engine="vllm", command=VLLM, args=flags, **fields)


def gpus(folder: Path, count: int) -> Path:
    """Return an inventory of so many GPUs."""
    devices = [{"index": n, "uuid": f"GPU-{n}", "name": "T4", "memory_mib": 16000} for n in range(count)]
    file = folder / "gpus.json"
    file.write_text(json.dumps({"devices": devices}))
    return file


def gguf(folder: Path, name: str) -> Path:
    return write_gguf_adapter(folder / f"{name}.gguf", 1)


def peft(folder: Path, name: str, base: object) -> Path:
    """Make an adapter that names its base, or none."""
    adapter = write_peft_adapter(folder / name, 1)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": base}))
    return adapter


def states(game: InferenceEngine) -> list[WorkerState]:
    """Return what the workers do whose engines are on the lanes, or were last."""
    return [lane.current.state for lane in game.status().lanes]


async def register(lanes: InferenceEngine, **checkpoints: str | Path) -> None:
    for name, checkpoint in checkpoints.items():
        await lanes.register_agent(agent_id=name, model_ckpt=checkpoint)


@dataclass(frozen=True)
class Asked:
    """A request that llama-server got: whose process, the model that it names, and the scale of each adapter."""

    pid: int
    model: str
    scales: Sequence[float] | None


def asked(record: Path) -> dict[str, Asked]:
    """Return what was asked by prompt, each once."""
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    found = {}
    for entry in entries:
        request = entry["request"]
        given = sorted(request["lora"], key=lambda each: each["id"]) if "lora" in request else None
        scales = None if given is None else [each["scale"] for each in given]
        found[request["messages"][-1]["content"]] = Asked(entry["pid"], request["model"], scales)
    assert len(found) == len(entries)
    return found


def told(record: Path) -> list[tuple[int, str]]:
    """Return the processes of vLLM, and what each was told."""
    return [(entry["pid"], entry["asked"]) for entry in map(json.loads, record.read_text().splitlines())]


def lanes_by_agent(log: Path) -> dict[str, tuple[str, str]]:
    """Return on which lane, and on which device, each agent was last."""
    return {event["agent"]: (event["lane"], event["gpu"]) for event in replay(log)}


def happened(log: Path) -> list[tuple[str, str]]:
    return [(event["event"], event["agent"]) for event in replay(log)]


async def is_started(log: Path, agent: str) -> None:
    await wait_until(lambda: (INFER_START, agent) in happened(log), f"a run of {agent} has started")


# One server


async def test_agents_of_one_base_share_one_process_of_llama_cpp(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Each request brings its own adapter in force and every other out of it; two agents may have the same one."""
    record, log = tmp_path / "record", tmp_path / "log"
    game = llama(free_ports, args={"record": str(record)}, slots=2, event_log=log)
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor="/models/town.gguf", clerk=gguf(tmp_path, "clerk"), poet=gguf(tmp_path, "poet"))
        await register(game, twin=tmp_path / "poet.gguf")
        agents = ("mayor", "clerk", "poet", "twin")
        await asyncio.gather(*(say(game, name, f"I am {name}.") for name in agents))
    requests = asked(record)
    (pid,) = {each.pid for each in requests.values()}
    assert requests == {
        "I am mayor.": Asked(pid, "town", [0.0, 0.0]),
        "I am clerk.": Asked(pid, "town", [1.0, 0.0]),
        "I am poet.": Asked(pid, "town", [0.0, 1.0]),
        "I am twin.": Asked(pid, "town", [0.0, 1.0]),
    }
    assert lanes_by_agent(log) == dict.fromkeys(agents, ("lane-0", "cpu"))


async def test_agents_of_one_base_share_one_process_of_vllm(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """However an adapter names its base: by its path, by a path from its own folder, or not at all."""
    town = tmp_path / "town"
    town.mkdir()
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path, count=4) as game:
        await register(game, clerk=peft(tmp_path, "clerk", str(town)), mayor=town)
        await register(game, poet=peft(tmp_path, "poet", "../town"), judge=peft(tmp_path, "judge", None))
        answers = {name: await say(game, name) for name in ("mayor", "clerk", "poet", "judge")}
    assert answers == {"mayor": "town", "clerk": "town+clerk", "poet": "town+poet", "judge": "town+judge"}
    assert [what for _, what in told(tmp_path / "record")].count("begin") == 1


async def test_checkpoints_of_one_name_are_told_apart(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A folder's name says little: of an adapter called as its base is, and of two that are called alike."""
    folders = [tmp_path / name for name in ("one", "other")]
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path, count=4) as game:
        await register(game, mayor="town", heir=peft(tmp_path, "town", "town"))
        await register(game, poet=peft(folders[0], "poet", "town"), rival=peft(folders[1], "poet", "town"))
        answers = {name: await say(game, name) for name in ("mayor", "heir", "poet", "rival")}
    assert answers == {"mayor": "town", "heir": "town+town-2", "poet": "town+poet", "rival": "town+poet-2"}


async def test_real_adapters_answer_as_they_do_alone(
    tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int]
) -> None:
    """llama.cpp itself, with an adapter from its start and one that comes later; the base is not disturbed."""
    flags = {"threads": 1, "temp": 0}
    game = llama(free_ports, engine="embedded", command=(), args=flags, context=512)
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor=tiny_model, clerk=gguf(tmp_path, "clerk"))
        before = {name: await say(game, name, step="think") for name in ("mayor", "clerk")}
        await register(game, poet=write_gguf_adapter(tmp_path / "poet.gguf", 2))
        after = {name: await say(game, name, step="think") for name in ("poet", "mayor", "clerk")}
    assert {name: after[name] for name in before} == before
    assert len(set(after.values())) == 3


# Bases


async def test_a_second_base_is_refused_where_there_is_one_device(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """And its adapters; the text says what is there, and the way out. The base that is there goes on."""
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path) as game:
        await register(game, mayor="town")
        for checkpoint in ("city", str(peft(tmp_path, "poet", "city"))):
            with pytest.raises(NoLane) as caught:
                await register(game, poet=checkpoint)
            assert str(caught.value) == (
                f"{checkpoint} cannot share a server with town: a server has one base model, and every lane has"
                f" another; {WAY_OUT}"
            )
        await register(game, poet=peft(tmp_path, "clerk", "town"))
        assert [await say(game, name) for name in ("mayor", "poet")] == ["town", "town+clerk"]


async def test_each_base_has_a_device_of_its_own(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its adapters go there, in whatever order they come; there is none for a third base, nor where another one is."""
    log = tmp_path / "log"
    game = vllm(free_ports, tmp_path, lanes=2, inventory=gpus(tmp_path, 2), event_log=log)
    async with asyncio.timeout(LIMIT), game:
        await register(game, clerk=peft(tmp_path, "clerk", "town"), poet=peft(tmp_path, "poet", "city"))
        await register(game, mayor="city", judge="town")
        with pytest.raises(NoLane, match=f"^farm cannot share a server with city, town: .* {WAY_OUT}$"):
            await register(game, farmer="farm")
        with pytest.raises(NoLane) as caught:
            await game.register_agent(agent_id="guest", model_ckpt=peft(tmp_path, "guest", "city"), lane_hint=0)
        assert str(caught.value) == (
            f"{tmp_path}/guest cannot share a server with town: a server has one base model, and lane 0 has another;"
            f" {WAY_OUT}"
        )
        await game.register_agent(agent_id="guest", model_ckpt=tmp_path / "guest", lane_hint=1)
        answers = {name: await say(game, name) for name in ("clerk", "poet", "mayor", "judge", "guest")}
    assert answers == {
        "clerk": "town+clerk", "poet": "city+poet", "mayor": "city", "judge": "town", "guest": "city+guest",
    }  # fmt: skip
    town, city = ("lane-0", "GPU-0"), ("lane-1", "GPU-1")
    assert lanes_by_agent(log) == {"clerk": town, "poet": city, "mayor": city, "judge": town, "guest": city}


async def test_what_is_more_than_a_server_holds_has_a_second_one(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Of the same base, on the next lane; a hint there has one too."""
    record, log = tmp_path / "record", tmp_path / "log"
    game = llama(free_ports, lanes=3, count=2, args={"record": str(record)}, inventory=gpus(tmp_path, 3), event_log=log)
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor="town")
        await game.register_agent(agent_id="judge", model_ckpt=gguf(tmp_path, "judge"), lane_hint=2)
        await register(game, clerk=gguf(tmp_path, "clerk"), poet=gguf(tmp_path, "poet"), cook=gguf(tmp_path, "cook"))
        agents = ("mayor", "clerk", "judge", "poet", "cook")
        for name in agents:
            await say(game, name, name)
    requests = asked(record)
    assert {name: (requests[name].model, requests[name].scales) for name in agents} == {
        "mayor": ("town", [0.0]),
        "clerk": ("town", [1.0]),
        "judge": ("town-2", [1.0, 0.0]),
        "poet": ("town-2", [0.0, 1.0]),
        "cook": ("town-3", [1.0]),
    }
    first, second, third = (("lane-0", "GPU-0"), ("lane-1", "GPU-1"), ("lane-2", "GPU-2"))
    assert lanes_by_agent(log) == {"mayor": first, "clerk": first, "judge": third, "poet": third, "cook": second}


async def test_a_second_server_goes_to_no_lane_of_another_base(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """It shares the lane of its own base, though the other's has no more pins; the other base finds its lane too."""
    log = tmp_path / "log"
    game = vllm(free_ports, tmp_path, lanes=2, count=1, inventory=gpus(tmp_path, 2), event_log=log)
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="mayor", model_ckpt="town", lane_hint=1)
        await register(game, judge="city", clerk=peft(tmp_path, "clerk", "town"), poet=peft(tmp_path, "poet", "city"))
        answers = [await say(game, name) for name in ("clerk", "poet")]  # no other was loaded: these go where they like
    assert answers == ["town+clerk", "city+poet"]
    assert lanes_by_agent(log) == {"clerk": ("lane-1", "GPU-1"), "poet": ("lane-0", "GPU-0")}


async def test_an_adapter_that_names_no_base_needs_one_to_be_the_only_one(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Which it is for, nobody can tell otherwise."""
    poet = gguf(tmp_path, "poet")
    game = llama(free_ports, lanes=2, inventory=gpus(tmp_path, 2))
    async with asyncio.timeout(LIMIT), game:
        with pytest.raises(NoLane) as caught:
            await register(game, poet=poet)
        assert str(caught.value) == f"{poet} is an adapter that names no base, and no base was registered before it"
        await register(game, mayor="town", judge="city")
        with pytest.raises(NoLane) as caught:
            await register(game, poet=poet)
        assert str(caught.value) == f"{poet} is an adapter that names no base, and there are city, town"


async def test_a_folder_with_a_model_is_no_adapter(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """An adapter's configuration is left in it where the adapter was merged into its base."""
    merged = peft(tmp_path, "merged", "town")
    (merged / "config.json").write_text("{}")
    game = vllm(free_ports, tmp_path, lanes=2, inventory=gpus(tmp_path, 2))
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor="town", poet=merged)
        assert [await say(game, name) for name in ("mayor", "poet")] == ["town", "merged"]
        with pytest.raises(NoLane, match=f"^farm cannot share a server with {merged}, town: "):
            await register(game, farmer="farm")


# Adapters that come later


async def test_an_adapter_that_comes_later_ends_no_run_of_llama_cpp(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The server is started again when the run that it has is over; who asks meanwhile waits for that."""
    record, log = tmp_path / "record", tmp_path / "log"
    game = llama(free_ports, args={"record": str(record), **HOLD}, event_log=log)
    held = f"HOLD={tmp_path}/go!"
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor="town")
        running = asyncio.create_task(say(game, "mayor", held))
        await is_started(log, "mayor")
        registering = asyncio.create_task(register(game, poet=gguf(tmp_path, "poet")))
        await wait_until(lambda: WorkerState.DRAINING in states(game), "it takes no new run")
        assert not registering.done()
        (tmp_path / "go").touch()
        assert await running
        await registering
        await asyncio.gather(say(game, "poet", "first"), say(game, "mayor", "second"))
    requests = asked(record)  # each prompt once: none was asked again
    assert requests["first"].pid == requests["second"].pid != requests[held].pid
    assert [requests[prompt].scales for prompt in (held, "first", "second")] == [None, [1.0], [0.0]]
    assert {event["outcome"] for event in replay(log) if event["event"] == INFER_DONE} == {"completed"}


async def test_an_adapter_that_comes_later_is_told_to_vllm(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its process goes on: it was started with room for as many as a server may have."""
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path) as game:
        await register(game, mayor="town")
        first = await say(game, "mayor")
        await register(game, poet=peft(tmp_path, "poet", "town"))
        answers = [first, await say(game, "poet"), await say(game, "mayor")]
        (pid,) = {pid for pid, _ in told(tmp_path / "record")}
        flags = psutil.Process(pid).cmdline()
    assert answers == ["town", "town+poet", "town"]
    assert flags[flags.index("--enable-lora") :][1:3] == ["--max-loras", "4"]  # one more, as for any model
    assert told(tmp_path / "record").count((pid, "/v1/load_lora_adapter")) == 1


async def test_an_adapter_may_come_while_the_server_is_loading(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Of llama.cpp: it begins with what it was started with, and the run that waited for it is not ended either."""
    record, log = tmp_path / "record", tmp_path / "log"
    script = 'echo >> "$0.tries"; until [ -e "$0" ]; do sleep 0.01; done; exec "$@"'
    command = ("sh", "-c", script, str(tmp_path / "go"), *LLAMA)
    game = llama(free_ports, command=command, args={"record": str(record)}, event_log=log)
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor="town")
        running = asyncio.create_task(say(game, "mayor", "first"))
        await wait_until((tmp_path / "go.tries").exists, "it loads")
        registering = asyncio.create_task(register(game, poet=gguf(tmp_path, "poet")))
        await wait_until(lambda: all(lane.lacking for lane in game.status().lanes), "it is to have the adapter")
        (tmp_path / "go").touch()
        assert await running
        await registering
        await say(game, "poet", "second")
    requests = asked(record)
    assert [requests[prompt].scales for prompt in ("first", "second")] == [None, [1.0]]
    assert len((tmp_path / "go.tries").read_text().splitlines()) == 2
    assert {event["outcome"] for event in replay(log) if event["event"] == INFER_DONE} == {"completed"}


async def test_an_adapter_may_come_while_vllm_is_loading(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It is told when it answers."""
    faults = tmp_path / "faults"
    faults.write_text(json.dumps([{"port": 0, "phase": "begin", "do": "stall"}]))
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path) as game:
        await register(game, mayor="town")
        running = asyncio.create_task(say(game, "mayor"))
        await wait_until((tmp_path / "record").exists, "it loads")
        registering = asyncio.create_task(register(game, poet=peft(tmp_path, "poet", "town")))
        await wait_until(lambda: all(lane.lacking for lane in game.status().lanes), "it is to have the adapter")
        faults.unlink()
        await registering
        assert [await running, await say(game, "poet")] == ["town", "town+poet"]
    assert [what for _, what in told(tmp_path / "record")].count("begin") == 1


async def test_an_agent_is_registered_though_its_server_does_not_start(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A server that fails again and again holds up no caller; one that starts at last has the adapter."""
    record, broken = tmp_path / "record", tmp_path / "broken"
    broken.touch()
    async with asyncio.timeout(LIMIT), llama(free_ports, args={"record": str(record), "exit-if": str(broken)}) as game:
        await register(game, mayor="town")
        news = game.events()
        running = asyncio.create_task(say(game, "mayor", "first"))
        assert (await anext(news))["event"] == "lane_dead"
        await register(game, poet=gguf(tmp_path, "poet"))
        assert not running.done()
        broken.unlink()
        await asyncio.gather(running, say(game, "poet", "second"))
    assert {prompt: each.scales for prompt, each in asked(record).items()} == {"first": [0.0], "second": [1.0]}


# What is no adapter


async def test_layout_b_serves_no_adapter(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its servers have one checkpoint each; what was merged is one."""
    merged = peft(tmp_path, "merged", "town")
    (merged / "config.json").write_text("{}")
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path, layout="B", lanes=3) as game:
        await register(game, mayor="town", twin=merged)
        for adapter in (peft(tmp_path, "clerk", "town"), peft(tmp_path, "judge", None), gguf(tmp_path, "poet")):
            with pytest.raises(InvalidSpec) as caught:
                await register(game, poet=adapter)
            assert str(caught.value) == f"model_ckpt: {adapter} is an adapter of a base, which only layout A serves"
        assert [await say(game, name) for name in ("mayor", "twin")] == ["town", "merged"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b""], ids=["cut", "list", "no-text", "empty"])
async def test_a_configuration_that_cannot_be_read_is_no_base_of_its_own(
    content: bytes, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Whoever wrote it is told of the file; mended, it can be registered."""
    adapter = peft(tmp_path, "poet", "town")
    config = adapter / "adapter_config.json"
    good = config.read_bytes()
    config.write_bytes(content)
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path) as game:
        with pytest.raises(InvalidSpec, match=f"^model_ckpt: {config} cannot be read: "):
            await register(game, poet=adapter)
        config.write_bytes(good)
        await register(game, poet=adapter)


async def test_an_adapter_of_another_engines_kind_is_refused_at_once(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Nor is one that is not whole taken: no server of the base would start with it, for any agent."""
    cut = peft(tmp_path, "cut", "town")
    (cut / "adapter_model.safetensors").unlink()
    of_vllm, of_llama = peft(tmp_path, "judge", None), gguf(tmp_path, "poet")
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path) as game, llama(free_ports) as other:
        for lanes in (game, other):
            await register(lanes, mayor="town")
        for lanes, adapter, name in ((game, cut, "vllm"), (game, of_llama, "vllm"), (other, of_vllm, "llama-server")):
            with pytest.raises(InvalidSpec, match=f"^model_ckpt: {adapter} is no adapter that {name} takes: "):
                await register(lanes, poet=adapter)
        assert [await say(lanes, "mayor") for lanes in (game, other)] == ["town", "word0 word1 word2 "]


async def test_an_adapter_that_its_server_does_not_start_with_is_left_out(
    tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int]
) -> None:
    """llama.cpp itself says so; it is started again without it, at once, and takes others."""
    strange = write_gguf_adapter(tmp_path / "strange.gguf", 1, architecture="qwen2")
    game = llama(free_ports, count=2, engine="embedded", command=(), args={"threads": 1, "temp": 0}, context=512)
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor=tiny_model)
        before = await say(game, "mayor", step="think")
        with pytest.raises(InvalidSpec, match=r"^model_ckpt: lane-0 does not start with adapter strange: "):
            await register(game, poet=strange)
        assert states(game) == [WorkerState.STARTING]
        assert await say(game, "mayor", step="think") == before
        await register(game, poet=gguf(tmp_path, "poet"))
        assert await say(game, "poet", step="think") != before


async def test_an_adapter_that_vllm_refuses_is_left_out(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Tried again, it has the name and the room that it would have had."""
    faults = tmp_path / "faults"
    faults.write_text(json.dumps([{"port": 0, "phase": "load", "do": "fail"}]))
    poet = peft(tmp_path, "poet", "town")
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path, count=2) as game:
        await register(game, mayor="town")
        await say(game, "mayor")
        with pytest.raises(InvalidSpec, match=r"^model_ckpt: lane-0 does not take adapter poet: .*as it was told"):
            await register(game, poet=poet)
        faults.unlink()
        await register(game, poet=poet)
        assert await say(game, "poet") == "town+poet"
    assert [what for _, what in told(tmp_path / "record")].count("begin") == 1


async def test_an_adapter_that_cannot_be_a_flag_is_left_out(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """llama-server cuts a list of paths at commas; the next adapter is not told of it."""
    record = tmp_path / "record"
    async with asyncio.timeout(LIMIT), llama(free_ports, count=2, args={"record": str(record)}) as game:
        await register(game, mayor="town")
        with pytest.raises(InvalidSpec, match="no path with a comma"):
            await register(game, poet=gguf(tmp_path, "a,b"))
        await register(game, poet=gguf(tmp_path, "poet"))
        await say(game, "poet", "hello")
    assert [each.scales for each in asked(record).values()] == [[1.0]]


async def test_a_caller_that_goes_away_leaves_no_adapter(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """While its registration waited for a run to end; the run goes on, and another adapter has the room."""
    record, log = tmp_path / "record", tmp_path / "log"
    game = llama(free_ports, count=2, args={"record": str(record), **HOLD}, event_log=log)
    held = f"HOLD={tmp_path}/go!"
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor="town")
        running = asyncio.create_task(say(game, "mayor", held))
        await is_started(log, "mayor")
        registering = asyncio.create_task(register(game, clerk=gguf(tmp_path, "clerk")))
        await wait_until(lambda: WorkerState.DRAINING in states(game), "it takes no new run")
        registering.cancel()
        await asyncio.wait([registering])
        (tmp_path / "go").touch()
        assert await running
        await register(game, clerk=gguf(tmp_path, "poet"))
        await say(game, "clerk", "hello")
    requests = asked(record)
    assert (requests["hello"].model, requests["hello"].scales) == ("town", [1.0])


# What an agent waits for


async def test_agents_of_one_server_wait_for_each_other(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """With one slot a run starts when another agent's has ended, though its own adapter is idle."""
    log = tmp_path / "log"
    async with asyncio.timeout(LIMIT), llama(free_ports, args=HOLD, event_log=log) as game:
        await register(game, mayor="town", poet=gguf(tmp_path, "poet"))
        first = asyncio.create_task(say(game, "mayor", f"HOLD={tmp_path}/go!"))
        await is_started(log, "mayor")
        second = asyncio.create_task(say(game, "poet"))
        await wait_until(
            lambda: any(each.waiting for each in game.status().models.values()), "the other run is in the queue"
        )
        (tmp_path / "go").touch()
        await asyncio.gather(first, second)
    assert happened(log) == [
        (INFER_START, "mayor"), (INFER_DONE, "mayor"), (INFER_START, "poet"), (INFER_DONE, "poet"),
    ]  # fmt: skip
    assert lanes_by_agent(log) == dict.fromkeys(("mayor", "poet"), ("lane-0", "cpu"))


@pytest.mark.parametrize(
    ("layout", "slots", "lanes"),
    [("B", 1, ["lane-0", "lane-1"]), ("A", 2, ["lane-0", "lane-0"])],
    ids=["servers-of-their-own", "two-slots"],
)
async def test_agents_with_a_slot_each_do_not_wait_for_each_other(
    layout: str, slots: int, lanes: list[str], tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """On one device all the same: a run ends while another agent's is still being answered."""
    log = tmp_path / "log"
    poet = "poet" if layout == "B" else gguf(tmp_path, "poet")
    fields: dict[str, Any] = {"layout": layout, "slots": slots, "lanes": 2, "count": 2}
    async with asyncio.timeout(LIMIT), llama(free_ports, args=HOLD, event_log=log, **fields) as game:
        await register(game, mayor="town", poet=poet)
        first = asyncio.create_task(say(game, "mayor", f"HOLD={tmp_path}/go!"))
        await is_started(log, "mayor")
        assert await say(game, "poet")
        assert not first.done()
        (tmp_path / "go").touch()
        await first
    assert happened(log) == [
        (INFER_START, "mayor"), (INFER_START, "poet"), (INFER_DONE, "poet"), (INFER_DONE, "mayor"),
    ]  # fmt: skip
    assert lanes_by_agent(log) == dict(zip(("mayor", "poet"), ((lane, "cpu") for lane in lanes), strict=True))
