"""Private copies of a model's adapters, named by digest, and their list: both survive restarts.

Engines get the copy and never the operator's own file: vLLM reads an adapter's folder again after it has made room for
others, and ends if the folder is gone by then.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from workers.adapters.validation import PEFT_FILES
from workers.files.atomic import replace_file, sync_folder

INDEX: Final = "adapters.json"
PIECE_BYTES: Final = 1024 * 1024
SPARE_BYTES: Final = 256 * 1024 * 1024  # left free for the store: a full disk accepts no jobs


class Adapter(Struct, frozen=True, kw_only=True):
    """One version of an adapter; ``digest`` is that of its files, ``size`` is in bytes, ``source`` its origin."""

    name: str
    digest: str
    size: int
    source: str
    loaded_at: str


class StoredAdapters(Struct, frozen=True, kw_only=True):
    """A model's adapters by name, and the digests of removed names: a name means one version.

    ``model`` is the model that they were loaded on.
    """

    model: str | None = None
    adapters: tuple[Adapter, ...] = ()
    past: dict[str, str] = {}


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """A copy in the store."""

    digest: str
    size: int


class AdapterStore:
    """The adapters of one model on disk; its methods block, so they stay out of the event loop."""

    def __init__(self, state_dir: Path, model: str, *, is_folder: bool) -> None:
        self._folder = state_dir.resolve() / "adapters" / quote(model, safe="")
        self._is_folder = is_folder

    def __repr__(self) -> str:
        return f"<AdapterStore {self._folder}>"

    def path(self, digest: str) -> Path:
        """Return the path of a copy: a folder in PEFT's form, or a GGUF file."""
        return self._folder / (digest if self._is_folder else f"{digest}.gguf")

    def read(self) -> StoredAdapters:
        """Return the stored adapters that are present, and remove all other files."""
        try:
            kept = msgspec.json.decode((self._folder / INDEX).read_bytes(), type=StoredAdapters)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            kept = StoredAdapters()
        here = tuple(adapter for adapter in kept.adapters if self.path(adapter.digest).exists())
        self._keep_only({adapter.digest for adapter in here})
        return StoredAdapters(model=kept.model, adapters=here, past=kept.past)

    def write(self, shelved: StoredAdapters) -> None:
        """Write the list.

        Raises:
            OSError: it cannot be written.
        """
        replace_file(self._folder / INDEX, msgspec.json.encode(shelved))

    def check_space(self, source: Path) -> None:
        """Check that a copy leaves enough of the disk to other writers.

        Raises:
            OSError: it does not.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        size = sum(file.stat().st_size for file in self._files(source))
        if shutil.disk_usage(self._folder).free < size + SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _files(self, source: Path) -> list[Path]:
        return [source / name for name in PEFT_FILES] if self._is_folder else [source]

    def put(self, source: Path) -> Copied:
        """Copy an adapter, durably.

        Raises:
            OSError: it cannot be read or copied.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        files = self._files(source)
        half = Path(tempfile.mkdtemp(dir=self._folder, prefix=".half-"))
        try:
            digest, size = hashlib.sha256(), 0
            for file in files:
                digest.update(f"{file.name if self._is_folder else ''}\n{file.stat().st_size}\n".encode())
                size += _copy(file, half / file.name, digest)
            sync_folder(half)
            copied = Copied(digest=digest.hexdigest(), size=size)
            whole = self.path(copied.digest)
            if not whole.exists():
                (half if self._is_folder else half / source.name).replace(whole)
                sync_folder(self._folder)
            return copied
        finally:
            shutil.rmtree(half, ignore_errors=True)

    def remove(self, digests: Iterable[str]) -> None:
        """Remove copies."""
        for digest in digests:
            _remove(self.path(digest))

    def _keep_only(self, digests: Collection[str]) -> None:
        wanted = {self.path(digest).name for digest in digests} | {INDEX}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in wanted:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or a folder; one that cannot be removed is tried again at the next start."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _copy(source: Path, target: Path, digest: "hashlib._Hash") -> int:
    size = 0
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(PIECE_BYTES):
            digest.update(piece)
            written.write(piece)
            size += len(piece)
        written.flush()
        os.fsync(written.fileno())
    return size
