"""Atomic replacement of files that others may be reading, and digests of files."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` and make it durable; a reader sees the old or the new, each whole.

    Raises:
        OSError: it cannot be written; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, half = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(half).chmod(mode)
        Path(half).replace(path)
    except BaseException:
        Path(half).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OSError: it cannot be synced.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_blob_of(path: Path) -> str:
    """Return Git's id of a file's content, a SHA-1 in hexadecimal digits.

    Raises:
        OSError: it cannot be read.

    Source: Git, ``gitformat-loose``.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        def with_head() -> Any:  # noqa: ANN401 - hashlib has no name for the type that it makes
            return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

        return hashlib.file_digest(file, with_head).hexdigest()
