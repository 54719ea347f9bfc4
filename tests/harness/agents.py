"""Inference engines for tests, with the specification of their workers and their own arguments in one call."""

import sys
from inspect import signature
from typing import Any, Final

from roundhouse import InferenceEngine
from tests.conftest import ENGINE_PROGRAM
from tests.harness.waiting import LIMIT_S
from workers.spec import WorkerSpec

LIMIT: Final = 3 * LIMIT_S
WORDS: Final = signature(InferenceEngine).parameters.keys() - {"spec"}


def engine_for_agents(**fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return an engine with one slot on each lane, unless ``slots`` says more."""
    words = {name: fields.pop(name) for name in WORDS & fields.keys()}
    return InferenceEngine(WorkerSpec(**{"engine": "vllm", "slots": 1, **fields}), **words)


def engine(first_port: int, *, count: int = 2, flags: dict[str, Any] | None = None, **fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return a scripted engine with this many lanes on each device; each device has ports of its own."""
    return engine_for_agents(
        engine="llama-server",
        command=(sys.executable, "-I", "-S", str(ENGINE_PROGRAM)),
        max_agents_per_gpu=count,
        **{"args": flags or {}, "ports": (first_port, first_port + count - 1), **fields},
    )


async def say(lanes: InferenceEngine, agent: str, prompt: str = "Who?", **fields: Any) -> str:  # noqa: ANN401
    return await lanes.run(agent, prompt, **{"step": "act", "max_tokens": 9, **fields})
