"""The state directory; one process owns it at a time, with any database."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from service.errors import StateUnusable

LOCK_NAME: Final = "roundhouse.lock"
logger = logging.getLogger(__name__)


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can read, since it contains prompts; another user's folder stays unchanged."""
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        found = folder.stat()
        if found.st_uid == os.geteuid() and found.st_gid in {os.getegid(), *os.getgroups()}:
            folder.chmod(0o700)
        elif found.st_mode & 0o077:
            logger.warning("%s: others may read what is kept there; its owner may change that", folder)


@contextmanager
def own_folder(folder: Path, lock_fd: int | None = None) -> Iterator[int]:
    """Own a state directory for a block: two Roundhouses in one would undo each other's work.

    Yields the descriptor of the lock; ``lock_fd`` is the one left by an earlier program of this process.

    Raises:
        StateUnusable: the directory cannot be used, or another process owns it.
    """
    try:
        _make_private(folder)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600) if lock_fd is None else lock_fd
    except OSError as error:
        raise StateUnusable(f"{folder}: cannot be used as state directory: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StateUnusable(
                f"{folder}: another Roundhouse (process {owner}) uses this state directory; "
                "stop it, or give this one another with --state-dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)
