"""Looks at new weights before any engine is told of them: what it cannot read breaks every engine at once.

What is not the whole model is refused too: engines fuse tensors, and one that comes without its neighbours leaves
theirs undefined.

Only headers are read (safetensors: eight bytes of length, then JSON), so a checkpoint of any size takes milliseconds.
"""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from workers.errors import InvalidUpdate
from workers.weights.update import Tensor

MAX_HEADER_BYTES: Final = 100 * 1024 * 1024  # the format's own limit
METADATA: Final = "__metadata__"


class _Entry(Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def check_checkpoint(folder: Path, model: str | None) -> None:
    """Return if ``folder`` holds whole safetensors, with the tensors of ``model`` where that is a folder as well.

    Raises:
        InvalidUpdate: it does not, and what is wrong with it.
    """
    _compare(f"checkpoint {folder}", _tensors(folder), model)


def check_tensors(tensors: Iterable[Tensor], model: str | None) -> None:
    """Return if ``tensors`` are those of ``model``, where that is a folder.

    Raises:
        InvalidUpdate: they are not.
    """
    _compare("tensors", {tensor.name: list(tensor.shape) for tensor in tensors}, model)


def _compare(what: str, found: Mapping[str, list[int]], model: str | None) -> None:
    if model is None or not Path(model).is_dir() or not list(Path(model).glob("*.safetensors")):
        return
    expected = _tensors(Path(model))
    missing = sorted(set(expected) - set(found))
    if missing:
        raise InvalidUpdate(f"{what}: {len(missing)} of the model's {len(expected)} are missing: {missing[0]}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise InvalidUpdate(f"{what}: {name} is {found[name]}, and in the model {shape}")


def _tensors(folder: Path) -> dict[str, list[int]]:
    if not folder.is_absolute() or not folder.is_dir():
        raise InvalidUpdate(f"checkpoint {folder}: is no folder with an absolute path")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidUpdate(f"checkpoint {folder}: holds no *.safetensors")
    return {name: entry.shape for file in files for name, entry in _header(file).items()}


def _header(file: Path) -> dict[str, _Entry]:
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > MAX_HEADER_BYTES:
                raise InvalidUpdate(f"checkpoint {file}: is no safetensors file")
            told = msgspec.json.decode(opened.read(size), type=dict[str, msgspec.Raw])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in told.items() if name != METADATA}
        end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if file.stat().st_size != 8 + size + end:
            raise InvalidUpdate(f"checkpoint {file}: is cut off: {file.stat().st_size} bytes of {8 + size + end}")
    except (OSError, struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidUpdate(f"checkpoint {file}: cannot be read: {error}") from error
    return entries
