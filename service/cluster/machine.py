"""The nodes of a cluster on this machine: each takes a number, and holds a lock with it for as long as it runs."""

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import psutil

from service.cluster.failure import ClusterFailed
from service.cluster.order import PRIVATE, ClusterHost, ClusterOrder, digest_of_text, make_private, needed_order
from service.errors import ConfigError

OFFSET: Final = 100  # ports between two nodes of one machine
MOST_NODES: Final = 64  # on a machine
LOOK_S: Final = 0.05
SERVES_S: Final = 0.2  # a look at all sockets takes milliseconds
LOOPBACK: Final = "127.0.0.1"
DATABASE_PORT: Final = 5432
DRAIN_MORE_S: Final = 60.0  # beyond ``drain_s``: engines end, and buffered results reach the store
SERVE_S: Final = 120.0  # until a started node listens: it may have to fetch a model first
HURRY_S: Final = 20.0  # after the second signal
LOCK: Final = "hhqqi"  # struct flock of a 64-bit Linux (fcntl(2)): type, whence, start, length, owner
TAIL_BYTES: Final = 4096
TAIL_LINES: Final = 5


class MachineNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster on this machine: its number there and its process."""

    number: int
    pid: int


def become_node(folder: Path, address: str | None) -> None:
    """Take a number, and become ``roundhouse serve``; it does not return.

    The lock is the process's, so it outlives an upgrade in place and ends with the service, however that ends.

    Raises:
        ConfigError: the order cannot be used, or the configuration here is another.
    """
    order = needed_order(folder)
    config = Path(order.config)
    if digest_of_text(config) != order.digest:
        raise ConfigError(f"{config} is not the file that the cluster was started with; copy it to this machine")
    states = states_of(order, folder)
    number, handle = _take_number(states)
    os.set_inheritable(handle, True)
    state_dir = states / node_name(number)
    state_dir.mkdir(mode=0o700, exist_ok=True)
    settings = {
        "ROUNDHOUSE_CLUSTER": f"{order.mark}-",
        "ROUNDHOUSE_CONFIG": str(config),
        "ROUNDHOUSE_PORT": str(order.port),
        "ROUNDHOUSE_HOST": order.host,
        "ROUNDHOUSE_ADDRESS": address or _own_address(order),
        "ROUNDHOUSE_STATE_DIR": str(state_dir),
        "ROUNDHOUSE_PORT_OFFSET": str(number * OFFSET),
    }
    environment = {**os.environ, **order.environment, **settings}
    os.chdir(config.parent)
    # Without -P a module beside the configuration would be imported.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "service.cli.main", "serve"], environment)  # noqa: S606


def _start_node(folder: Path, order: ClusterOrder, address: str | None) -> "subprocess.Popen[bytes]":
    """Start a node that outlives this process; its output goes to the machine's log in the cluster's folder."""
    command = [*order.command, "cluster", "node", "--home", str(folder), *(("--address", address) if address else ())]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    handle = os.open(log_of(folder), flags, PRIVATE)  # it may quote answers
    with os.fdopen(handle, "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def start_nodes(folder: Path, order: ClusterOrder, count: int, address: str | None = None) -> None:
    """Start nodes until ``count`` run on this machine, and return once each of them serves.

    Raises:
        ClusterFailed: one ended, or does not serve in time; its last lines are in the message.
        OSError: one cannot be started.
    """
    missing = count - len(nodes_here(folder, order))
    started = [_start_node(folder, order, address) for _ in range(missing)]
    end = time.monotonic() + SERVE_S
    while True:
        serving = {node.pid for node in nodes_here(folder, order) if _serves(order, node)}
        waited_for = [process for process in started if process.pid not in serving]
        if not waited_for:
            return
        failed = [process for process in waited_for if process.poll() is not None]
        if failed or time.monotonic() > end:
            log = log_of(folder)
            what = f"ended with status {failed[0].returncode}" if failed else f"does not serve after {SERVE_S:g} s"
            raise ClusterFailed(f"a node on {socket.gethostname()} {what}; {log} ends with:\n{tail_of(log)}")
        time.sleep(SERVES_S)


def _serves(order: ClusterOrder, node: MachineNode) -> bool:
    """Whether a node itself listens at its port; another program may."""
    try:
        sockets = psutil.Process(node.pid).net_connections("tcp")
    except psutil.Error:
        return False
    port = order.port + node.number * OFFSET
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)


def nodes_here(folder: Path, order: ClusterOrder) -> list[MachineNode]:
    """Return the cluster's nodes that run on this machine."""
    return list(_running(states_of(order, folder)))


def stop_nodes(folder: Path, order: ClusterOrder) -> Mapping[int, str]:
    """Drain the cluster's nodes on this machine; return how each ended."""
    states = states_of(order, folder)
    # A second command waits for the first: its own signals would end the drain.
    with _open_lock(states / f"{socket.gethostname()}.stop", os.O_CREAT) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _stop(states, order.drain_s)


def _stop(states: Path, drain_s: float) -> Mapping[int, str]:
    how = dict[int, str]()
    for sent, limit_s, word in (
        (signal.SIGTERM, drain_s + DRAIN_MORE_S, "drained"),
        (signal.SIGTERM, HURRY_S, "stopped at once"),
        (signal.SIGKILL, HURRY_S, "killed"),
    ):
        left = list(_running(states))
        for node in left:
            how[node.number] = word
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(node.pid, sent)
        end = time.monotonic() + limit_s
        while {node.number for node in _running(states)} & {node.number for node in left}:
            if time.monotonic() > end:
                break
            time.sleep(LOOK_S)
        else:
            return how
    return how


def states_of(order: ClusterOrder, folder: Path) -> Path:
    """Return the folder with the states of this machine's nodes; it is made if need be."""
    states = folder if order.on is ClusterHost.HERE else Path(order.state_dir).expanduser()
    make_private(states)
    return states


def node_name(number: int) -> str:
    """Return the name of a node's folder: machines may share the folder around it."""
    return f"{socket.gethostname()}-{number}"


def log_of(folder: Path) -> Path:
    """Return the log of this machine's nodes."""
    return folder / f"{socket.gethostname()}.log"


def tail_of(log: Path) -> str:
    """Return the last lines of a log; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    except OSError:
        return ""


def _own_address(order: ClusterOrder) -> str:
    """Return this machine's address for the other nodes: the one from which it reaches the database, as they do."""
    if order.on is ClusterHost.HERE:
        return LOOPBACK
    given = os.environ.get("ROUNDHOUSE_ADDRESS")
    if given:
        return given
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415 - it takes a tenth of a second

    database = conninfo_to_dict(order.store_url)
    host = str(database.get("hostaddr") or database.get("host") or LOOPBACK).split(",")[0]
    if host.startswith("/"):  # a socket of this machine
        return socket.gethostname()
    port = str(database.get("port") or DATABASE_PORT).split(",")[0]
    try:
        for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"the database's host {host}: {error}; this machine's address cannot be found out") from error
    raise ConfigError(f"the database's host {host} has no address")


def _take_number(states: Path) -> tuple[int, int]:
    for number in range(MOST_NODES):
        handle = os.open(_lock_of(states, number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another node has it
            os.close(handle)
        else:
            return number, handle
    raise ConfigError(f"{states}: {MOST_NODES} nodes run on this machine already")


def _lock_of(states: Path, number: int) -> Path:
    return states / f"{node_name(number)}.lock"


def _running(states: Path) -> Iterator[MachineNode]:
    for number in range(MOST_NODES):
        path = _lock_of(states, number)
        try:
            with _open_lock(path) as file:
                asked = struct.pack(LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                kind, _, _, _, owner = struct.unpack(LOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        except FileNotFoundError:
            continue
        if kind == fcntl.F_UNLCK:
            continue
        if owner <= 1:  # such a number would mean a whole group of processes to kill(2)
            raise ClusterFailed(f"{path} is locked by a process of another machine or container; end the node there")
        yield MachineNode(number=number, pid=owner)


def _open_lock(path: Path, create: int = 0) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | create, PRIVATE), "r+b", buffering=0)
