"""How much memory a model takes: its weights by its files, its KV cache by its shape. Reads headers alone.

Source: llama.cpp, ``gguf-py`` and ``docs/development`` for the keys; Hugging Face's ``config.json`` for checkpoints.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 1024 * 1024
CACHE_BYTES: Final = 2  # of one number in the KV cache: both engines keep 16 bits by default
OVERHEAD_MIB: Final = 256  # of an engine beside its model: its buffers, its context on the device
PART: Final = ".gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """MiB of weights, and bytes of KV cache a token; None where the files do not tell."""

    weights_mib: int
    token_bytes: int | None

    def need_mib(self, tokens: int) -> int | None:
        """Return what an engine takes that keeps so many tokens; None where that is not known."""
        if self.token_bytes is None:
            return None
        return self.weights_mib + self.token_bytes * tokens // MIB + OVERHEAD_MIB


def model_memory(model: str) -> ModelMemory | None:
    """Return what a model's files tell: a GGUF file or the folder of a checkpoint; None where it has no file here."""
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
    """Return the bytes a token of a GGUF file, None without the library that reads its header."""
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an extra, with numpy
    except ModuleNotFoundError:
        return None
    try:
        fields = GGUFReader(path).fields
    except (ValueError, OSError, IndexError):  # the engine will say what is wrong with it
        return None

    def number(key: str) -> int | None:
        found = fields.get(f"{architecture}.{key}")
        value = None if found is None else found.contents()
        return max(value) if isinstance(value, list) and value else value if isinstance(value, int) else None

    found = fields.get("general.architecture")
    architecture = found.contents() if found is not None else ""
    heads, width, layers = number("attention.head_count"), number("embedding_length"), number("block_count")
    if not (heads and width and layers):
        return None
    key, value = number("attention.key_length") or width // heads, number("attention.value_length") or width // heads
    return layers * (number("attention.head_count_kv") or heads) * (key + value) * CACHE_BYTES


def _checkpoint(folder: Path) -> int | None:
    """Return the bytes a token of a checkpoint in Hugging Face's form."""
    try:
        config: Mapping[str, object] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    layers, heads, width = (config.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int) and heads):
        return None
    shared, each = config.get("num_key_value_heads"), config.get("head_dim")
    shared = shared if isinstance(shared, int) else heads
    each = each if isinstance(each, int) else width // heads
    return layers * shared * each * 2 * CACHE_BYTES
