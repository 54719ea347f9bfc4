"""The memory that a model takes: its weights by its files, its KV cache by its shape. Reads headers alone.

Source: llama.cpp, ``gguf-py`` and ``docs/development`` for the keys; Hugging Face's ``config.json`` for checkpoints.
"""

import json
from pathlib import Path
from typing import Final

import msgspec

from workers.errors import InvalidTensors
from workers.files.gguf_header import read_gguf_header

MIB: Final = 1024 * 1024
CACHE_BYTES: Final = 2  # of one number in the KV cache: both engines keep 16 bits by default
OVERHEAD_MIB: Final = 256  # of an engine beside its model: its buffers, its context on the device
PART: Final = ".gguf"
MAX_CONFIG_BYTES: Final = 4 * 1024 * 1024
MOST_DIMENSION: Final = 10_000_000
DIMENSIONS: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """MiB of weights, and bytes of KV cache a token; None where the files do not tell."""

    weights_mib: int
    token_bytes: int | None

    def need_mib(self, tokens: int) -> int | None:
        """Return the memory of an engine with a cache of so many tokens; None if unknown."""
        if self.token_bytes is None:
            return None
        return self.weights_mib + self.token_bytes * tokens // MIB + OVERHEAD_MIB


def model_memory(model: str) -> ModelMemory | None:
    """Read a model's memory from its files, a GGUF file or a checkpoint's folder; None if it has no file here."""
    path = Path(model)
    if path.is_file() and path.suffix == PART:
        return ModelMemory(weights_mib=_mib(sum(part.stat().st_size for part in _parts(path))), token_bytes=_gguf(path))
    weights = list(path.glob("*.safetensors")) if path.is_dir() else []
    if not weights:
        return None
    return ModelMemory(weights_mib=_mib(sum(file.stat().st_size for file in weights)), token_bytes=_checkpoint(path))


def _mib(size: int) -> int:
    return -(-size // MIB)


def _parts(path: Path) -> list[Path]:
    """Return all files of a model that was split: NAME-00001-of-00003.gguf."""
    name, _, count = path.stem.rpartition("-of-")
    return sorted(path.parent.glob(f"{name[:-5]}*-of-{count}.gguf")) if name and count.isdecimal() else [path]


def _gguf(path: Path) -> int | None:
    """Return the bytes a token of a GGUF file."""
    try:
        entries = read_gguf_header(path)
    except InvalidTensors:  # the engine will say what is wrong with it
        return None
    architecture = entries.get("general.architecture", "")

    def number(key: str) -> int | None:
        found = entries.get(f"{architecture}.{key}")
        return _dimension(max(found, default=0) if isinstance(found, list) else found)

    heads, width, layers = number("attention.head_count"), number("embedding_length"), number("block_count")
    if not (heads and width and layers):
        return None
    key, value = number("attention.key_length") or width // heads, number("attention.value_length") or width // heads
    return layers * (number("attention.head_count_kv") or heads) * (key + value) * CACHE_BYTES


def _checkpoint(folder: Path) -> int | None:
    """Return the bytes a token of a checkpoint in Hugging Face's form."""
    try:
        with (folder / "config.json").open("rb") as opened:
            config = json.loads(opened.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    config = inner if isinstance(inner, dict) else config
    if not isinstance(config, dict):
        return None
    layers, heads, width, shared, each = (_dimension(config.get(key)) for key in DIMENSIONS)
    if not (layers and heads and width):
        return None
    return layers * (shared or heads) * (each or width // heads) * 2 * CACHE_BYTES


def _dimension(told: object) -> int | None:
    """Return a dimension that a file tells of, None where it cannot be one."""
    return told if isinstance(told, int) and not isinstance(told, bool) and 0 < told <= MOST_DIMENSION else None
