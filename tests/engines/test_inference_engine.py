"""``InferenceEngine`` on its default engine, real vLLM, here on the CPU: lanes, sleep, layout A."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from roundhouse import InferenceEngine
from roundhouse.inference.event_log import INFER_DONE, replay
from tests.behaviour.test_inference_engine import processes
from tests.engines.adapters import write_peft_adapter
from tests.engines.checkpoint import write_checkpoint
from tests.engines.subjects import VLLM_ENVIRONMENT
from tests.harness.agents import engine_for_agents, say
from workers.spec import Flag

LIMIT_S: Final = 400.0  # a start takes some 20 s, and up to 60 s beside another
FLAGS: Final[Mapping[str, Flag]] = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "override_generation_config": '{"temperature": 0}',
}
SLEEPY: Final = Path(__file__).with_name("sleepy_vllm.py")


def vllm(
    python: str,
    ports: Callable[[int], int],
    *,
    count: int,
    program: Sequence[str] = (),
    **fields: Any,  # noqa: ANN401
) -> InferenceEngine:
    """Return an engine with this many lanes on the CPU, or with one for this many checkpoints in layout A."""
    first = ports(count)
    return engine_for_agents(
        command=(python, *(program or ("-m", "vllm.entrypoints.openai.api_server"))),
        env=VLLM_ENVIRONMENT,
        max_agents_per_gpu=count,
        ports=(first, first + count - 1),
        args={**FLAGS, **fields.pop("args", {})},
        **fields,
    )


def fronts() -> Mapping[str, psutil.Process]:
    """Return the servers that run, by the checkpoint that each was started with: the first of each tree."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process().children(recursive=True):
        words = child.cmdline()
        if "--model" in words:
            found.setdefault(Path(words[words.index("--model") + 1]).name, child)
    return found


@pytest.fixture
def others() -> set[int]:
    """The processes from before a test: foreign servers go on from test to test."""
    return processes()


async def register(game: InferenceEngine, **checkpoints: Path) -> None:
    for name, checkpoint in checkpoints.items():
        await game.register_agent(agent_id=name, model_ckpt=checkpoint)


async def test_three_checkpoints_share_two_lanes(
    tmp_path: Path, free_ports: Callable[[int], int], vllm_python: str, others: set[int]
) -> None:
    """Two run side by side, and the third gets a lane; each gives its own answers, also after it returns."""
    checkpoints = {name: write_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("ada", "bob", "cid"))}
    log = tmp_path / "events.jsonl"
    game = vllm(vllm_python, free_ports, count=2, event_log=log)
    async with asyncio.timeout(LIMIT_S), game:
        await register(game, **checkpoints)
        ada, bob = await asyncio.gather(say(game, "ada"), say(game, "bob"))
        assert fronts().keys() == {"ada", "bob"}
        cid = await say(game, "cid")
        assert len(fronts()) == 2
        (left,) = {"ada", "bob"} - fronts().keys()
        again = await say(game, left)
    assert again == {"ada": ada, "bob": bob}[left]
    assert len({ada, bob, cid}) == 3
    assert processes() <= others
    lanes = {event["lane"] for event in replay(log) if event["event"] == INFER_DONE}
    assert lanes == {"lane-0", "lane-1"}


async def test_a_checkpoint_sleeps_while_another_has_its_lane(
    tmp_path: Path, free_ports: Callable[[int], int], vllm_python: str, others: set[int]
) -> None:
    """Both engines start once; the one with a turn wakes, and answers as before."""
    checkpoints = {name: write_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("ada", "bob"))}
    game = vllm(
        vllm_python,
        free_ports,
        count=1,
        program=(str(SLEEPY),),
        args={"enable_sleep_mode": True},
        state_dir=tmp_path / "state",
    )
    async with asyncio.timeout(LIMIT_S), game:
        await register(game, **checkpoints)
        first = {name: await say(game, name) for name in ("ada", "bob")}
        pids = {name: front.pid for name, front in fronts().items()}
        assert pids.keys() == {"ada", "bob"}
        for _ in range(3):
            assert {name: await say(game, name) for name in ("ada", "bob")} == first
        assert {name: front.pid for name, front in fronts().items()} == pids
    assert len(set(first.values())) == 2
    assert processes() <= others


async def test_agents_of_one_base_share_one_server(
    tmp_path: Path, free_ports: Callable[[int], int], vllm_python: str, others: set[int]
) -> None:
    """Layout A has adapters from the start and one that comes later.

    Each gives its own answers, and the base as before.
    """
    base = write_checkpoint(tmp_path / "town", 0)
    adapters = {name: _adapter(tmp_path / name, seed, base) for seed, name in enumerate(("clerk", "poet"), 1)}
    async with asyncio.timeout(LIMIT_S), vllm(vllm_python, free_ports, count=3, layout="A", slots=2) as game:
        await register(game, mayor=base, clerk=adapters["clerk"])
        mayor, clerk = await asyncio.gather(say(game, "mayor"), say(game, "clerk"))
        await register(game, poet=adapters["poet"])
        poet = await say(game, "poet")
        again = [await say(game, name) for name in ("mayor", "clerk", "poet")]
        assert fronts().keys() == {"town"}
    assert again == [mayor, clerk, poet]
    assert len({mayor, clerk, poet}) == 3
    assert processes() <= others


def _adapter(folder: Path, seed: int, base: Path) -> Path:
    """Make an adapter that names its base."""
    adapter = write_peft_adapter(folder, seed)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(base)}))
    return adapter
