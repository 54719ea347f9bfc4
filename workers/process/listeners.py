"""The listener at a port of this machine, as the kernel reports it (proc(5): tcp, fd)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING: Final = "0A"
WORKER: Final = "ROUNDHOUSE_WORKER"  # in an engine's environment: the worker that started it


def foreign_listener(port: int) -> int | None:
    """Return the user whose program listens at a port, if that is not only ours; else None."""
    users = {uid for uid, _ in _listeners(port)}
    return min(users - {os.geteuid()}, default=None)


def holder_of(port: int) -> str | None:
    """Describe the process that listens at a port; None without one, or if we may not look at it."""
    sockets = {f"socket:[{inode}]" for _, inode in _listeners(port)}
    if not sockets:
        return None
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and not sockets.isdisjoint(_files_of(folder)):
            return _shown(folder)
    return None


def _listeners(port: int) -> Iterator[tuple[int, str]]:
    """Yield user and inode of each socket that listens there."""
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in map(str.split, lines):
            if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                yield int(row[7]), row[9]


def _files_of(folder: Path) -> Iterator[str]:
    try:
        for file in (folder / "fd").iterdir():
            try:
                yield str(file.readlink())
            except OSError:
                continue  # it was closed
    except OSError:
        return  # another user's, or gone


def _shown(folder: Path) -> str:
    try:
        name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        entries = (folder / "environ").read_bytes().split(b"\0")
        cwd = (folder / "cwd").readlink()
    except OSError:  # it has gone, or is another user's
        return f"pid {folder.name}"
    marks = [entry.partition(b"=")[2] for entry in entries if entry.startswith(f"{WORKER}=".encode())]
    worker = f", worker {marks[0].decode(errors='replace')} of the Roundhouse in {cwd}" if marks else ""
    return f"pid {folder.name} ({name}{worker})"
