"""Headers of safetensors files: eight bytes of length, then JSON. Files of any size are read in milliseconds.

Source: the format's description in the README of huggingface/safetensors.
"""

import struct
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from workers.errors import InvalidTensors

MAX_HEADER_BYTES: Final = 8 * 1024 * 1024  # the format allows 100 MB; some 50,000 tensors take this much
METADATA: Final = "__metadata__"
Shapes = dict[str, list[int]]


class _Entry(Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_folder(folder: Path) -> Shapes:
    """Return the shapes of all tensors in a folder, by name.

    Raises:
        InvalidTensors: there are none, or a file is incomplete.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidTensors(f"{folder.name} holds no *.safetensors")
    return {name: shape for file in files for name, shape in read_shapes(file).items()}


def read_shapes(file: Path) -> Shapes:
    """Return the shapes of a file's tensors, by name.

    Raises:
        InvalidTensors: it is no safetensors file, or an incomplete one.
    """
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > MAX_HEADER_BYTES:
                raise InvalidTensors(
                    f"{file.name} is not a safetensors file, or its header is over {MAX_HEADER_BYTES} bytes"
                )
            header = msgspec.json.decode(opened.read(size), type=dict[str, msgspec.Raw])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items() if name != METADATA}
        end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if file.stat().st_size != 8 + size + end:
            raise InvalidTensors(f"{file.name} is cut off: {file.stat().st_size} bytes of {8 + size + end}")
    except (OSError, struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidTensors(f"{file.name} cannot be read: {error}") from error
    return {name: entry.shape for name, entry in entries.items()}
