"""The memory that a model takes: its weights by its files, its KV cache by its shape. Reads only headers.

Source: llama.cpp, ``gguf-py`` and ``docs/development`` for the keys; Hugging Face's ``config.json`` for checkpoints.
"""

import json
import re
from pathlib import Path
from typing import Final

import msgspec

from workers.errors import InvalidTensors
from workers.files.gguf_header import read_gguf_header

MIB: Final = 1024 * 1024
CACHE_BYTES: Final = 2  # per number in the KV cache: both engines keep 16 bits by default
OVERHEAD_MIB: Final = 256  # an engine beside its model: its buffers, its context on the device
PART: Final = ".gguf"
MAX_CONFIG_BYTES: Final = 4 * 1024 * 1024
MOST_DIMENSION: Final = 10_000_000
_SPLIT: Final = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
DIMENSIONS: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """MiB of weights, bytes of KV cache per token, and layers; None if the files do not say."""

    weights_mib: int
    token_bytes: int | None
    layers: int | None = None

    def need_mib(self, tokens: int) -> int | None:
        """Return the memory of an engine with a cache of ``tokens``; None if unknown."""
        if self.token_bytes is None:
            return None
        return self.weights_mib + self.token_bytes * tokens // MIB + OVERHEAD_MIB


def model_memory(model: str) -> ModelMemory | None:
    """Read a model's memory from its files, a GGUF file or a checkpoint's folder; None without a file here."""
    path = Path(model)
    if path.is_file() and path.suffix == PART:
        token_bytes, layers = _gguf(path)
        size = sum(part.stat().st_size for part in _parts(path))
        return ModelMemory(weights_mib=_mib(size), token_bytes=token_bytes, layers=layers)
    weights = list(path.glob("*.safetensors")) if path.is_dir() else []
    if not weights:
        return None
    return ModelMemory(weights_mib=_mib(sum(file.stat().st_size for file in weights)), token_bytes=_checkpoint(path))


def _mib(size: int) -> int:
    return -(-size // MIB)


def _parts(path: Path) -> list[Path]:
    """Return all files of a split model: NAME-00001-of-00003.gguf."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    parts = (path.with_name(f"{split['stem']}-{number:05}-of-{split['count']}{PART}") for number in _numbers(split))
    return [part for part in parts if part.is_file()]


def _numbers(split: re.Match[str]) -> range:
    return range(1, int(split["count"]) + 1)


def _gguf(path: Path) -> tuple[int | None, int | None]:
    """Return the bytes per token of a GGUF file, and its layers."""
    try:
        entries = read_gguf_header(path)
    except InvalidTensors:  # the engine will report the fault
        return None, None
    architecture = entries.get("general.architecture", "")

    def number(key: str) -> int | None:
        found = entries.get(f"{architecture}.{key}")
        return _dimension(max(found, default=0) if isinstance(found, list) else found)

    heads, width, layers = number("attention.head_count"), number("embedding_length"), number("block_count")
    if not (heads and width and layers):
        return None, layers
    key, value = number("attention.key_length") or width // heads, number("attention.value_length") or width // heads
    return layers * (number("attention.head_count_kv") or heads) * (key + value) * CACHE_BYTES, layers


def _checkpoint(folder: Path) -> int | None:
    """Return the bytes per token of a checkpoint in Hugging Face's form."""
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


def _dimension(value: object) -> int | None:
    """Return a dimension from a file, None if it is impossible."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_DIMENSION else None
