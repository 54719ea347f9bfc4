"""Inference engines for tests, whose worker's specification and own words are given in one."""

from inspect import signature
from typing import Any, Final

from roundhouse import InferenceEngine
from workers.spec import WorkerSpec

WORDS: Final = signature(InferenceEngine).parameters.keys() - {"spec"}


def engine_for_agents(**fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return an engine of one slot on each lane, unless ``slots`` says more."""
    words = {name: fields.pop(name) for name in WORDS & fields.keys()}
    return InferenceEngine(WorkerSpec(**{"engine": "vllm", "slots": 1, **fields}), **words)
