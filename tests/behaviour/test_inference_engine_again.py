"""What agents of ``InferenceEngine`` learn of time, markup and their lane, and which names mean a checkpoint."""

import asyncio
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from roundhouse.inference import lane_agents
from tests.harness.agents import LIMIT, engine, engine_for_agents, say
from tests.harness.service import recorded
from tests.harness.waiting import LIMIT_S, wait_until
from workers import request_runner
from workers.errors import InvalidSpec, ModelUnavailable
from workers.tools.runner import PythonTools

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class _Days(datetime):
    """The machine's clock, advanced by the days that the test lets pass."""

    passed = timedelta()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + cls.passed


def beginnings(record: Path, prompt: str) -> list[str]:
    """Return the first messages of the requests with a prompt."""
    asked = [request["messages"] for request in recorded(record)]
    return [messages[0]["content"] for messages in asked if prompt in json.dumps(messages)]


async def test_a_prompt_has_the_time_of_its_run(
    tmp_path: Path, free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A game goes on for days; the time of the constructor must not be in all of its prompts."""
    for module in (lane_agents, request_runner):
        monkeypatch.setattr(module, "datetime", _Days, raising=False)
    monkeypatch.setattr(_Days, "passed", timedelta())
    record = tmp_path / "record"
    game = engine(
        free_ports(1),
        count=1,
        flags={"record": str(record)},
        tools=[LOOK],
        tool_runner=PythonTools({"look": lambda: "a wall"}),
    )
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        await say(game, "a", "PROMPT-first")
        monkeypatch.setattr(_Days, "passed", timedelta(days=3))
        await say(game, "a", "PROMPT-later")
    (first,), (later,) = beginnings(record, "PROMPT-first"), beginnings(record, "PROMPT-later")
    today = datetime.now(UTC).astimezone()
    assert any(f"{today - timedelta(days=ago):%Y-%m-%d}" in first for ago in (0, 1))
    assert any(f"{today + timedelta(days=3 - ago):%Y-%m-%d}" in later for ago in (0, 1))


@pytest.mark.parametrize(("bios", "is_told"), [(True, True), (None, False), (False, False)])
async def test_a_model_learns_the_markup_if_its_author_wants_it(
    tmp_path: Path, free_ports: Callable[[int], int], *, bios: bool | None, is_told: bool
) -> None:
    """Also without tools: no other text explains ``<answer>`` and ``<wait/>``."""
    record = tmp_path / "record"
    flags = {"record": str(record)}
    async with asyncio.timeout(LIMIT), engine(free_ports(1), count=1, flags=flags, system="A town.", bios=bios) as game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        await say(game, "a", "PROMPT-x")
    (beginning,) = beginnings(record, "PROMPT-x")
    assert ("<answer>" in beginning and "<wait/>" in beginning) is is_told
    assert "A town." in beginning


async def test_an_agent_is_notified_when_its_lane_is_back(free_ports: Callable[[int], int]) -> None:
    """Each agent that was notified of the loss is notified by name: a game has no table of lanes and agents."""
    told: list[dict[str, Any]] = []
    game = engine(free_ports(1), count=1)
    async with asyncio.timeout(LIMIT), game:

        async def follow() -> None:
            async for news in game.events():
                told.append(news)  # noqa: PERF401 - each is looked at as it comes

        following = asyncio.create_task(follow())
        for name in ("a", "b"):
            await game.register_agent(agent_id=name, model_ckpt="m")
        await say(game, "a")
        pid = game.status().lanes[0].current.pid
        assert pid is not None
        psutil.Process(pid).kill()
        await wait_until(lambda: any(each["event"] == "lane_back" for each in told), "the lane is back")
    await following
    events = [(each["event"], each.get("agent")) for each in told if each["event"] != "swap"]
    assert events == [
        ("lane_dead", None),
        ("agent_disconnected", "a"),
        ("agent_disconnected", "b"),
        ("lane_back", None),
        ("agent_back", "a"),
        ("agent_back", "b"),
    ]


@pytest.mark.parametrize("name", ["no/such", "./no/such", "roundhouse:enormous", "hf:not-a-repository"])
async def test_a_missing_checkpoint_is_refused_at_registration(free_ports: Callable[[int], int], name: str) -> None:
    """Otherwise the run would wait for ever while its engine exits at each start."""
    game = engine_for_agents(engine="embedded", max_agents_per_gpu=1, ports=(port := free_ports(1), port))
    async with asyncio.timeout(LIMIT), game:
        with pytest.raises((InvalidSpec, ModelUnavailable), match=name.rpartition("/")[2]):
            await game.register_agent(agent_id="a", model_ckpt=name)


@pytest.mark.parametrize(
    ("engine", "name", "told"),
    [
        ("embedded", "", "without a name"),
        ("embedded", ".", "is no GGUF file"),
        ("embedded", "page.gguf", "is no GGUF file"),
        ("vllm", "page.gguf", "is no folder of a checkpoint"),
    ],
)
async def test_a_checkpoint_that_no_engine_loads_is_refused_at_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], int], engine: str, name: str, told: str
) -> None:
    """It is treated like a missing one."""
    (tmp_path / "page.gguf").write_text("<!doctype html>")
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    game = engine_for_agents(engine=engine, max_agents_per_gpu=1, ports=(port := free_ports(1), port))
    async with asyncio.timeout(LIMIT), game:
        with pytest.raises(InvalidSpec, match=told):
            await game.register_agent(agent_id="a", model_ckpt=name)


async def test_a_checkpoint_may_have_the_names_that_a_configuration_accepts(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The tiny model is made where it is needed, and answers."""
    game = engine_for_agents(
        engine="embedded", max_agents_per_gpu=1, ports=(port := free_ports(1), port), context=512,
        args={"threads": 1}, state_dir=tmp_path,
    )  # fmt: skip
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="a", model_ckpt="roundhouse:tiny")
        assert await say(game, "a", step="think", deadline_s=2 * LIMIT_S)
