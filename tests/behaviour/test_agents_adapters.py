"""Adapters of agents that are added while their server runs, and adapters that no server takes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from roundhouse.inference.event_log import INFER_DONE, replay
from tests.engines.adapters import write_gguf_adapter
from tests.harness.adapted import HOLD, LLAMA, asked, gguf, is_started, llama, peft, register, states, told, vllm
from tests.harness.agents import LIMIT, say
from tests.harness.waiting import wait_until
from workers.errors import InvalidSpec
from workers.states import WorkerState

# Adapters that come later


async def test_a_later_adapter_ends_no_run_of_llama_cpp(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The server restarts once its current run is over; later runs wait for that."""
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


async def test_a_later_adapter_is_loaded_into_the_running_vllm(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Its process goes on: it started with room for as many adapters as a server may have."""
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


async def test_an_adapter_may_be_added_while_llama_cpp_is_loading(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The server starts with its first adapters; the run that waited for it is not ended either."""
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


async def test_an_adapter_may_be_added_while_vllm_is_loading(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The server gets the adapter as soon as it answers."""
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
    """A server that fails again and again blocks no caller; once it starts, it has the adapter."""
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


# Invalid adapters


async def test_layout_b_serves_no_adapter(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its servers have one checkpoint each; a merged adapter is a checkpoint."""
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
async def test_an_unreadable_adapter_configuration_is_refused(
    content: bytes, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The refusal names the file; once it is repaired, the adapter can be registered."""
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
    """An incomplete adapter is refused too: no server of the base would start with it, for any agent."""
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
    """llama.cpp itself rejects it; the server restarts at once without it, and takes other adapters."""
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
    """A second attempt gets the name and the place that the first would have had."""
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
    """llama-server splits a list of paths at commas; the next adapter does not inherit the refusal."""
    record = tmp_path / "record"
    async with asyncio.timeout(LIMIT), llama(free_ports, count=2, args={"record": str(record)}) as game:
        await register(game, mayor="town")
        with pytest.raises(InvalidSpec, match="no path with a comma"):
            await register(game, poet=gguf(tmp_path, "a,b"))
        await register(game, poet=gguf(tmp_path, "poet"))
        await say(game, "poet", "hello")
    assert [each.scales for each in asked(record).values()] == [[1.0]]


async def test_a_caller_that_goes_away_leaves_no_adapter(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The caller leaves while its registration waits for a run to end.

    The run goes on, and another adapter gets the place.
    """
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
