"""Agents of one base on servers of scripted engines: their adapters, and the servers' requests."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from roundhouse import InferenceEngine
from roundhouse.inference.event_log import INFER_START, replay
from tests.conftest import ENGINE_PROGRAM
from tests.engines.adapters import write_gguf_adapter, write_peft_adapter
from tests.harness.agents import engine_for_agents
from tests.harness.programs import PROGRAMS
from tests.harness.waiting import wait_until
from workers.states import WorkerState

LLAMA: Final = (sys.executable, "-I", "-S", str(ENGINE_PROGRAM))


VLLM: Final = (sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py"))


HOLD: Final = {"hold": r"HOLD=(\S+?)!"}


WAY_OUT: Final = "give layout B, or an adapter of that base"


def llama(ports: Callable[[int], int], *, lanes: int = 1, count: int = 3, **fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return an engine of layout A with this many lanes of this many checkpoints."""
    first = ports(lanes)
    given = {"engine": "llama-server", "command": LLAMA, "layout": "A", **fields}
    return engine_for_agents(max_agents_per_gpu=count, ports=(first, first + lanes - 1), **given)


def vllm(ports: Callable[[int], int], folder: Path, **fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return the same for vLLM, which writes its requests to ``record``, and fails as ``faults`` says."""
    flags = {"record": str(folder / "record"), "fault-file": str(folder / "faults")}
    return llama(ports, engine="vllm", command=VLLM, args=flags, **fields)


def gpus(folder: Path, count: int) -> Path:
    """Return an inventory of this many GPUs."""
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
    """Return the states of the workers whose engines are on the lanes, or were last."""
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
    """Return the requests by prompt, each once."""
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
    """Return vLLM's processes, and the requests of each."""
    return [(entry["pid"], entry["asked"]) for entry in map(json.loads, record.read_text().splitlines())]


def lanes_by_agent(log: Path) -> dict[str, tuple[str, str]]:
    """Return the lane and device of each agent's last run."""
    return {event["agent"]: (event["lane"], event["gpu"]) for event in replay(log)}


def happened(log: Path) -> list[tuple[str, str]]:
    return [(event["event"], event["agent"]) for event in replay(log)]


async def is_started(log: Path, agent: str) -> None:
    await wait_until(lambda: (INFER_START, agent) in happened(log), f"a run of {agent} has started")
