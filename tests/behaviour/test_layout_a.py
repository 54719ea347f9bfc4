"""Layout A of ``InferenceEngine``: checkpoints that are adapters of one base share a server, and its slots."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundhouse.inference.event_log import INFER_DONE, INFER_START
from roundhouse.inference.failures import NoLane
from tests.engines.adapters import write_gguf_adapter
from tests.harness.adapted import (
    HOLD,
    WAY_OUT,
    Asked,
    asked,
    gguf,
    gpus,
    happened,
    is_started,
    lanes_by_agent,
    llama,
    peft,
    register,
    told,
    vllm,
)
from tests.harness.agents import LIMIT, say
from tests.harness.waiting import wait_until

# One server


async def test_agents_of_one_base_share_one_process_of_llama_cpp(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Each request activates its own adapter and no other; two agents may have the same one."""
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
    """An adapter may name its base by its path, by a path from its own folder, or not at all."""
    town = tmp_path / "town"
    town.mkdir()
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path, count=4) as game:
        await register(game, clerk=peft(tmp_path, "clerk", str(town)), mayor=town)
        await register(game, poet=peft(tmp_path, "poet", "../town"), judge=peft(tmp_path, "judge", None))
        answers = {name: await say(game, name) for name in ("mayor", "clerk", "poet", "judge")}
    assert answers == {"mayor": "town", "clerk": "town+clerk", "poet": "town+poet", "judge": "town+judge"}
    assert [what for _, what in told(tmp_path / "record")].count("begin") == 1


async def test_checkpoints_of_one_name_are_kept_apart(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Names of folders are not unique: an adapter may have its base's name, or another adapter's."""
    folders = [tmp_path / name for name in ("one", "other")]
    async with asyncio.timeout(LIMIT), vllm(free_ports, tmp_path, count=4) as game:
        await register(game, mayor="town", heir=peft(tmp_path, "town", "town"))
        await register(game, poet=peft(folders[0], "poet", "town"), rival=peft(folders[1], "poet", "town"))
        answers = {name: await say(game, name) for name in ("mayor", "heir", "poet", "rival")}
    assert answers == {"mayor": "town", "heir": "town+town-2", "poet": "town+poet", "rival": "town+poet-2"}


async def test_real_adapters_answer_as_they_do_alone(
    tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int]
) -> None:
    """Real llama.cpp, with an adapter from its start and one that comes later; the base's answers stay the same."""
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
    """Its adapters are refused too; the message says what is there, and the remedy. The first base goes on."""
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
    """Its adapters go there in any order. There is none for a third base, nor on another base's device."""
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


async def test_adapters_beyond_one_servers_limit_start_a_second_server(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """It has the same base, on the next lane; a hint there starts one too."""
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
    """It shares the lane of its own base, though the other's has fewer pins; the other base finds its lane too."""
    log = tmp_path / "log"
    game = vllm(free_ports, tmp_path, lanes=2, count=1, inventory=gpus(tmp_path, 2), event_log=log)
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="mayor", model_ckpt="town", lane_hint=1)
        await register(game, judge="city", clerk=peft(tmp_path, "clerk", "town"), poet=peft(tmp_path, "poet", "city"))
        answers = [await say(game, name) for name in ("clerk", "poet")]  # no other was loaded: these go where they like
    assert answers == ["town+clerk", "city+poet"]
    assert lanes_by_agent(log) == {"clerk": ("lane-1", "GPU-1"), "poet": ("lane-0", "GPU-0")}


async def test_an_adapter_that_names_no_base_needs_a_single_base(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Otherwise its base is unknown."""
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
    """A merged adapter leaves its configuration beside the model."""
    merged = peft(tmp_path, "merged", "town")
    (merged / "config.json").write_text("{}")
    game = vllm(free_ports, tmp_path, lanes=2, inventory=gpus(tmp_path, 2))
    async with asyncio.timeout(LIMIT), game:
        await register(game, mayor="town", poet=merged)
        assert [await say(game, name) for name in ("mayor", "poet")] == ["town", "merged"]
        with pytest.raises(NoLane, match=f"^farm cannot share a server with {merged}, town: "):
            await register(game, farmer="farm")


# Waits of agents


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
    """They share one device: a run ends while another agent's is still being answered."""
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
