"""The address of an engine that is about to start: free, and not another server's."""

import os
import socket
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from transport.endpoint import Endpoint
from workers.errors import SpawnFailed
from workers.process.listeners import holder_of

PORT_LIMIT_S: Final = 2.0  # the kernel frees a dead tree's port at once; a driver or a debugger may hold it a moment
PORT_POLL_S: Final = 0.05


async def wait_address(at: Endpoint, model: str) -> None:
    """Return when an engine can listen there; another server's answers must never be taken for our engine's.

    Raises:
        SpawnFailed: it cannot.
    """
    if at.uds is not None:
        _clear_socket(Path(at.uds))
        return
    host, port = at.host, at.port
    with anyio.move_on_after(PORT_LIMIT_S):
        while _port_fault(host, port) is not None:  # noqa: ASYNC110 - the kernel gives no signal
            await anyio.sleep(PORT_POLL_S)
    fault = _port_fault(host, port)
    if fault is not None:
        holder = await anyio.to_thread.run_sync(holder_of, port)
        whose = f" by {holder}; set models.{model}.port to another" if holder else ""
        raise SpawnFailed(f"cannot listen on {host}:{port}: {fault.strerror}{whose}") from fault


def _clear_socket(path: Path) -> None:
    """Remove a dead engine's socket; one on which a process still answers is not ours to take."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.parent.stat().st_uid != os.geteuid():
            raise SpawnFailed(f"cannot listen on {path}: its folder is another user's")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(os.fspath(path)) == 0:
                raise SpawnFailed(f"cannot listen on {path}: another program does")
        path.unlink(missing_ok=True)
    except OSError as error:
        raise SpawnFailed(f"cannot listen on {path}: {error.strerror}") from error


def _port_fault(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as engines do: TIME_WAIT is no owner
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
