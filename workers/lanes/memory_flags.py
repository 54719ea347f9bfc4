"""Flags that change a model's memory on its device from the estimate by its files. Pure.

Source: llama.cpp, ``tools/server/README.md``, for the flags and the variables that stand for them; vLLM, ``vllm serve
--help``.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from workers.engine.launch.flags import named
from workers.spec import EngineKind, Flag, WorkerSpec

VARIABLE: Final = "LLAMA_ARG_"  # prefix of each flag's variable
_LAYERS: Final = frozenset({"ngl", "gpu-layers", "n-gpu-layers"})
# They keep parts of a model in the host's memory, which lanes on the CPU share.
_KEPT_OFF: Final = frozenset({
    "cmoe", "cpu-moe", "ncmoe", "n-cpu-moe", "ot", "override-tensor", "nkvo", "no-kv-offload", "rpc",
})  # fmt: skip
_CACHE_TYPES: Final = frozenset({"ctk", "cache-type-k", "ctv", "cache-type-v"})
_FURTHER: Final = frozenset({
    "md", "model-draft", "spec-draft-model", "hfd", "hfrd", "hf-repo-draft", "mm", "mmproj", "mmu", "mmproj-url",
})  # fmt: skip
_OF_VLLM: Final = frozenset(
    {"cpu-offload-gb", "kv-cache-dtype", "q", "quantization", "hf-overrides", "speculative-config"}
)
_USUAL: Final = frozenset({"f16", "bf16", "auto"})  # types of the cache that the estimate assumes
_OFF: Final = frozenset({"0", "0.0", "false", "off", "disabled", "no", "", "none"})


class Estimate(StrEnum):
    """The worth of an estimate from a model's files."""

    RIGHT = "right"
    AT_LEAST = "at least"  # the engine loads more beside the model
    WORTHLESS = "worthless"  # the device may hold much less


def estimate_of(spec: WorkerSpec, environment: Mapping[str, str], *, layers: int | None, is_on_cpu: bool) -> Estimate:
    """Return the worth of an estimate from a model's files, for an engine with these flags and this environment.

    ``layers`` are the model's, None if its files do not say.
    """
    if spec.engine is EngineKind.VLLM:
        given = {
            name for name, value in _given(spec, {}).items() if name in _OF_VLLM and _text(value) not in _OFF | _USUAL
        }
        return Estimate.WORTHLESS if given else Estimate.RIGHT
    flags = {name: value for name, value in _given(spec, environment).items() if _text(value) not in _OFF}
    cache = {_text(flags[name]) for name in _CACHE_TYPES & flags.keys()}
    if cache - _USUAL or (not is_on_cpu and _keeps_off(_given(spec, environment), flags, layers)):
        return Estimate.WORTHLESS
    return Estimate.AT_LEAST if _FURTHER & flags.keys() else Estimate.RIGHT


def _keeps_off(given: Mapping[str, Flag], flags: Mapping[str, Flag], layers: int | None) -> bool:
    if _KEPT_OFF & flags.keys() or _text(given.get("kv-offload", True)) in _OFF:
        return True
    given_values = [_text(given[name]) for name in _LAYERS & given.keys() if given[name] is not None]
    # One more than its layers: the output counts as one. Negative numbers mean all.
    return any(value.isdecimal() and (layers is None or int(value) <= layers) for value in given_values)


def _given(spec: WorkerSpec, environment: Mapping[str, str]) -> dict[str, Flag]:
    """Return the flags of an engine: from variables, from its command, from ``args``."""
    variables = {**environment, **spec.env}
    found: dict[str, Flag] = {
        name.removeprefix(VARIABLE).lower().replace("_", "-"): value
        for name, value in variables.items()
        if name.startswith(VARIABLE)
    }
    return {**found, **_in_command(spec.command), **named(spec.args)}


def _in_command(command: Sequence[str]) -> dict[str, Flag]:
    found: dict[str, Flag] = {}
    for word, following in zip(command, [*command[1:], "-"], strict=False):
        if word.startswith("-"):
            name, is_joined, value = word.partition("=")
            is_value = not following.startswith("-") or following[1:].isdecimal()
            found[name] = value if is_joined else following if is_value else True
    return named(found)


def _text(value: Flag) -> str:
    return "" if value is None else str(value).lower()
