"""The service: HTTP over a running node, from the first signal to the last process."""

import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup

from service.api.app import build_app
from service.api.door.connections import most_connections
from service.api.door.http_server import BACKLOG, HttpServer, server_config
from service.config.schema import Config
from service.conversations.callers import Caller, shares_of
from service.errors import ConfigError
from service.node.node import Left, open_node
from service.node.retention import release_always
from service.node.webhooks import Webhooks
from service.systemd import ServiceManager
from service.upgrade.handover import Inherited, let_signals_in
from service.upgrade.upgrader import Upgrader
from workers.notifier import Notifier
from workers.spec import WorkerSpec

COLLECTOR_THRESHOLDS: Final = (50_000, 10, 10)
logger = logging.getLogger(__name__)


def spare_the_collector() -> None:
    """Have the garbage collector look at what is old less often.

    Thousands of live jobs are a million objects, and a look at all of them stops everything for 0.3 s. Measured with
    ``bench.posting``: 1.4 times the jobs a second, and 88 ms instead of 320 at the 99th percentile. What ends is freed
    by its count; what is left to the collector is small.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        ConfigError: it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        text = f"cannot listen on {host}:{port}: {error.strerror}; give another with --port or server.port"
        raise ConfigError(text) from error
    listener.setblocking(False)
    return listener


async def serve(
    config: Config,
    specs: Sequence[WorkerSpec],
    state_dir: Path,
    roots: Sequence[Path],
    callers: Mapping[bytes, Caller],
    listener: socket.socket,
    inherited: Inherited | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: once drains and stops, twice stops at once. No process is left.

    ``roots`` are where callers may have adapters and checkpoints read from, ``callers`` who may ask, by the digests of
    their keys. ``inherited`` is what an earlier program of this process has left; SIGUSR2 leaves it to another one.

    Raises:
        StoreError: the store cannot be opened, or failed (then in a group).
    """
    spare_the_collector()
    stop, hurry, upgrade = anyio.Event(), anyio.Event(), Notifier()
    manager = ServiceManager.of(os.environ)
    # Signals are ours from before the first engine to after the last.
    with listener, anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR2) as signals:
        let_signals_in()
        async with anyio.create_task_group() as watching:
            watching.start_soon(_watch_signals, signals, stop, hurry, upgrade)
            watching.start_soon(manager.feed)
            async with (
                open_node(config, specs, state_dir, shares_of(callers.values()), _left(inherited)) as node,
                anyio.create_task_group() as keeping,
                anyio.create_task_group() as tasks,
            ):
                await node.intake.claim_first()
                tasks.start_soon(node.intake.run)
                keeping.start_soon(Webhooks(node.store, config.webhooks).run)
                keeping.start_soon(release_always, node.store, config.store)
                most = most_connections(len(specs), sum(spec.slots for spec in specs))
                upgrader = Upgrader(node, config, listener.fileno(), inherited)
                app = build_app(node, config, roots, callers, upgrader)
                accepted = inherited.handover.connections if inherited else ()
                front = HttpServer(server_config(app, most), listener, accepted)
                tasks.start_soon(front.run_until_told)
                serving = "serving at http://{}:{}".format(*listener.getsockname()[:2])
                logger.info(serving)
                manager.tell_ready(serving)
                logger.info("the dashboard is at %s", page_address(listener))
                async with anyio.create_task_group() as upgrading:
                    upgrading.start_soon(upgrader.run, front)
                    upgrading.start_soon(_upgrade_when_told, upgrader, upgrade, upgrading)
                    await stop.wait()
                    upgrading.cancel_scope.cancel()  # and undone, before the rest is drained
                draining = f"draining for up to {config.server.drain_s:g} s"
                logger.info(draining)
                manager.tell_stopping(draining)
                await node.shut_down(config.server.drain_s, hurry)
                front.should_exit = True
                keeping.cancel_scope.cancel()
            watching.cancel_scope.cancel()
    logger.info("stopped")


def page_address(listener: socket.socket) -> str:
    """Return what a browser of this machine is given to open the dashboard."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - what is listened on is no address to ask
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _left(inherited: Inherited | None) -> Left:
    if inherited is None:
        return Left()
    handover = inherited.handover
    return Left(lock_fd=handover.lock_fd, fleet=handover.fleet, children=inherited.children)


async def _upgrade_when_told(upgrader: Upgrader, told: Notifier, tasks: TaskGroup) -> None:
    while True:
        await told.wait()
        tasks.start_soon(upgrader.ask_by_signal)


async def _watch_signals(
    signals: AsyncIterator[signal.Signals], stop: anyio.Event, hurry: anyio.Event, upgrade: Notifier
) -> None:
    async for number in signals:
        if number is signal.SIGUSR2:
            logger.info("SIGUSR2: upgrading in place")
            upgrade.notify()
            continue
        logger.info("%s: %s", number.name, "stopping at once" if stop.is_set() else "stopping; once more stops at once")
        (hurry if stop.is_set() else stop).set()
