"""Headers of GGUF files, with every count checked against the file's size: a header may lie.

llama.cpp's own reader for Python trusts the header: an array of 2^60 bytes fills the memory. This one reads no more
than the file holds, and skips lists, except those of a few numbers.

Source: ggml-org/ggml, ``docs/gguf.md``, version 3.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from workers.errors import InvalidTensors

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER_BYTES: Final = 256 * 1024 * 1024  # vocabularies of a quarter of a million words take some 10 MB
MAX_ENTRIES: Final = 65_536
MAX_ITEMS: Final = 4_000_000  # all lists together: each text in one is skipped by itself
MAX_KEPT: Final = 1024  # most numbers of a list that is kept, such as one per layer
MAX_TEXT_BYTES: Final = 64 * 1024  # longest text that is kept
_NUMBERS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
COMPANIONS: Final = {"mmproj": "a projector", "adapter": "an adapter", "imatrix": "an importance matrix"}
_TEXT, _LIST = 8, 9
Value = int | float | bool | str | list[int]


def read_gguf_header(file: Path) -> Mapping[str, Value]:
    """Return the entries of a file's header by name: numbers, texts, and lists of a few whole numbers.

    Raises:
        InvalidTensors: it is no GGUF file, or an incomplete one.
    """
    try:
        with file.open("rb") as opened:
            return _Reader(opened, file.stat().st_size).entries()
    except (OSError, struct.error, UnicodeDecodeError) as error:
        raise InvalidTensors(f"{file.name} is not a whole GGUF file: {error}") from error


def is_gguf(file: Path) -> bool:
    """Whether a file begins like a GGUF file; an unreadable one does not."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def companion_of(file: Path) -> str | None:
    """Return the kind of companion that a GGUF file declares; None for a model or an undeclared kind."""
    try:
        return COMPANIONS.get(str(read_gguf_header(file).get("general.type")))
    except InvalidTensors:  # the engine will report the fault
        return None


class _Reader:
    """Reads one header from its beginning."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = min(size, MAX_HEADER_BYTES)
        self._items_left = MAX_ITEMS

    def entries(self) -> Mapping[str, Value]:
        if self._take(len(MAGIC)) != MAGIC or self._number("<I") not in VERSIONS:
            raise InvalidTensors("it is not a GGUF file")
        self._number("<Q")  # number of tensors, whose names come after the entries
        count = self._number("<Q")
        if count > MAX_ENTRIES:
            raise InvalidTensors(f"its header claims {count} entries")
        entries: dict[str, Value] = {}
        for _ in range(int(count)):
            name = self._text()
            value = self._value(int(self._number("<I")))
            if value is not None:
                entries[name] = value
        return entries

    def _value(self, kind: int) -> Value | None:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            size = int(self._number("<Q"))
            if size > MAX_TEXT_BYTES:  # a chat template, for example
                self._skip(size)
                return None
            return self._take(size).decode()
        if kind == _LIST:
            return self._list(int(self._number("<I")), int(self._number("<Q")))
        raise InvalidTensors(f"its header has an entry of the kind {kind}")

    def _list(self, kind: int, count: int) -> list[int] | None:
        if kind in _NUMBERS:
            form = _NUMBERS[kind]
            size = struct.calcsize(form) * count
            if count > MAX_KEPT or form in {"<f", "<d", "<?"}:
                self._skip(size)
                return None
            return list(struct.unpack(f"<{count}{form[1]}", self._take(size)))
        self._items_left -= count
        if kind != _TEXT or self._items_left < 0:
            raise InvalidTensors(f"its header has a list of {count} entries of the kind {kind}")
        for _ in range(count):
            self._skip(int(self._number("<Q")))
        return None

    def _text(self) -> str:
        size = int(self._number("<Q"))
        if size > MAX_TEXT_BYTES:
            raise InvalidTensors(f"its header has a name of {size} bytes")
        return self._take(size).decode()

    def _number(self, form: str) -> int | float:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        number: int | float = value
        return number

    def _take(self, size: int) -> bytes:
        self._count(size)
        return self._file.read(size)

    def _skip(self, size: int) -> None:
        self._count(size)
        self._file.seek(size, 1)

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise InvalidTensors("its header claims more than the file holds")
