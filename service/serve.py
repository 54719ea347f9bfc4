"""The service: HTTP over a running node, from the first signal to the last process."""

import contextlib
import gc
import hashlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from starlette.types import ASGIApp

from service.api.app import Front, build_app
from service.api.door.connections import most_connections
from service.api.door.http_server import BACKLOG, Accepted, HttpServer, server_config
from service.api.openai.resumed import resume_request
from service.config.source import LoadedConfig
from service.conversations.callers import shares_of
from service.errors import ConfigError
from service.node.node import Left, Node, open_node
from service.node.reloader import Reloader, reload_on
from service.node.retention import release_always
from service.node.webhooks import Webhooks
from service.systemd import ServiceManager
from service.telemetry.logs import set_format
from service.upgrade.handover import Inherited, let_signals_in
from service.upgrade.upgrader import Upgrader
from workers.notifier import Notifier

PACKAGES: Final = ("service", "workers", "transport", "roundhouse_client")
COLLECTOR_THRESHOLDS: Final = (50_000, 10, 10)
logger = logging.getLogger(__name__)


def fingerprint(files: Iterable[Path]) -> str:
    """Return a digest of some files and of the code, as they are on disk now."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            digest.update(repr(str(file)).encode() + file.read_bytes())
        except OSError as error:
            digest.update(repr((str(file), error.errno)).encode())
    for spec in map(find_spec, PACKAGES):
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for source in sorted(Path(folder).rglob("*.py")):
                digest.update(repr(_state_of(source)).encode())
    return digest.hexdigest()


def _state_of(file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), found.st_mtime_ns, found.st_size


def spare_the_collector() -> None:
    """Make the garbage collector scan old objects less often.

    Thousands of live jobs are a million objects, and a scan of all of them stops everything for 0.3 s. Measured with
    ``bench.posting``: 1.4 times the jobs per second, and 88 ms instead of 320 at the 99th percentile. Reference counts
    free ended jobs; little is left to the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        ConfigError: it cannot listen there.
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
    loaded: LoadedConfig,
    load: Callable[[], LoadedConfig],
    listener: socket.socket,
    inherited: Inherited | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: once drains and stops, twice stops at once. No process is left.

    SIGHUP reloads the configuration with ``load``; SIGUSR2 upgrades in place. ``inherited`` is the handover from an
    earlier program of this process.

    Raises:
        StoreError: the store cannot be opened, or failed (then in a group).
    """
    spare_the_collector()
    stop, hurry, upgrade = anyio.Event(), anyio.Event(), Notifier()
    # While a reload runs, one further request is kept: one more reload serves any number of requests.
    ask_reload, reloads = anyio.create_memory_object_stream[None](1)
    config, manager = loaded.config, ServiceManager.of(os.environ)
    # Signals are handled from before the first engine starts until after the last ends.
    with (
        listener,
        ask_reload,
        reloads,
        anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2) as signals,
    ):
        let_signals_in()
        async with anyio.create_task_group() as watching:
            watching.start_soon(_watch_signals, signals, stop, hurry, ask_reload, upgrade)
            watching.start_soon(manager.feed_watchdog)
            async with (
                open_node(
                    config,
                    loaded.specs,
                    config.server.state_dir,
                    shares_of(loaded.callers.values()),
                    _left(inherited),
                    loaded.variables,
                ) as node,
                anyio.create_task_group() as serving,
                anyio.create_task_group() as keeping,  # inside, so that its cancellation spares answers under way
            ):
                await node.intake.claim_first()
                for run in (node.intake.run, node.callers.run, node.past_hour.run, node.rollouts.run, node.keep_halves):
                    keeping.start_soon(run)
                webhooks = Webhooks(node.store, config.webhooks, node.metrics.count_delivery)
                keeping.start_soon(webhooks.run)
                keeping.start_soon(release_always, node.store, lambda: node.live.config.store)
                reloader = Reloader(node, loaded, load)
                upgrader = Upgrader(node, listener.fileno(), inherited, lambda: fingerprint(reloader.loaded.files))
                front = Front(_app_of(node, loaded, reloader, upgrader))
                accepted = _accepted(node, loaded, inherited)
                server = HttpServer(server_config(front, _connections_of(loaded)), listener, accepted)
                reloader.follow(partial(_prepare, node, front, webhooks, server, reloader, upgrader))
                status = "serving at http://{}:{}".format(*listener.getsockname()[:2])
                keeping.start_soon(reload_on, reloads, reloader, partial(manager.reloading, status))
                serving.start_soon(server.run_until_told)
                gc.freeze()  # the HTTP app too: its first scan would delay a first token by 15 ms
                logger.info(status)
                manager.tell_ready(status)
                logger.info("the dashboard is at %s", page_address(listener))
                watching.start_soon(_hurry_up, hurry, server)
                await _upgrade_until(stop, upgrader, server, upgrade)
                drain_s = node.live.config.server.drain_s
                draining = f"draining for up to {drain_s:g} s"
                logger.info(draining)
                manager.tell_stopping(draining)
                await node.shut_down(drain_s, hurry)
                server.should_exit = True
                keeping.cancel_scope.cancel()
            watching.cancel_scope.cancel()
    logger.info("stopped")


def page_address(listener: socket.socket) -> str:
    """Return the address of the dashboard for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - a wildcard is no address for a browser
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _left(inherited: Inherited | None) -> Left:
    if inherited is None:
        return Left()
    handover = inherited.handover
    return Left(lock_fd=handover.lock_fd, fleet=handover.fleet, servers=handover.servers, children=inherited.children)


async def _hurry_up(hurry: anyio.Event, server: HttpServer) -> None:
    """End answers under way too, once a second signal asks for an immediate stop."""
    await hurry.wait()
    server.force_exit = True


async def _upgrade_until(stop: anyio.Event, upgrader: Upgrader, server: HttpServer, request: Notifier) -> None:
    """Perform upgrades until ``stop``; one under way at that moment is undone first."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(upgrader.run, server)
        tasks.start_soon(_upgrade_on_request, upgrader, request, tasks)
        await stop.wait()
        tasks.cancel_scope.cancel()


async def _upgrade_on_request(upgrader: Upgrader, request: Notifier, tasks: TaskGroup) -> None:
    while True:
        await request.wait()
        tasks.start_soon(upgrader.ask_by_signal)


async def _watch_signals(
    signals: AsyncIterator[signal.Signals],
    stop: anyio.Event,
    hurry: anyio.Event,
    ask_reload: MemoryObjectSendStream[None],
    upgrade: Notifier,
) -> None:
    async for number in signals:
        if number is signal.SIGUSR2:
            logger.info("SIGUSR2: upgrading in place")
            upgrade.notify()
            continue
        if number is signal.SIGHUP:
            logger.info("SIGHUP: reloading the configuration")
            with contextlib.suppress(anyio.WouldBlock):
                ask_reload.send_nowait(None)
            continue
        how, event = ("stopping at once", hurry) if stop.is_set() else ("stopping; once more stops at once", stop)
        logger.info("%s: %s", number.name, how)
        event.set()


def _app_of(node: Node, loaded: LoadedConfig, reloader: Reloader, upgrader: Upgrader) -> ASGIApp:
    return build_app(node, loaded.config, loaded.roots, loaded.callers, reloader, upgrader)


def _prepare(
    node: Node,
    front: Front,
    webhooks: Webhooks,
    server: HttpServer,
    reloader: Reloader,
    upgrader: Upgrader,
    new: LoadedConfig,
) -> Callable[[], None]:
    """Prepare the HTTP side for a new configuration; return a function that puts it into force."""
    old, app = reloader.loaded, front.current
    seen_by_app = (new.config.server, new.config.limits, new.roots, new.callers)
    if (old.config.server, old.config.limits, old.roots, old.callers) != seen_by_app:
        app = _app_of(node, new, reloader, upgrader)

    def put_in_force() -> None:
        front.current = app
        set_format(new.config.server.log)
        webhooks.use(new.config.webhooks)
        server.config.limit_concurrency = _connections_of(new)

    return put_in_force


def _accepted(node: Node, loaded: LoadedConfig, inherited: Inherited | None) -> list[Accepted]:
    """Return the connections of an earlier program, each with the answer to its request, if it has one."""
    if inherited is None:
        return []
    accepted = [Accepted(fd) for fd in inherited.handover.connections]
    for each in inherited.handover.streams:
        try:
            answer = resume_request(node, loaded.config.server.heartbeat_s, each.request)
        except msgspec.MsgspecError as error:  # one request is not worth all engines
            logger.warning("a request of the earlier program cannot be read, and ends: %s", error)
            os.close(each.fd)
        else:
            accepted.append(Accepted(each.fd, answer, answer.has_begun, answer.keeps_alive))
    return accepted


def _connections_of(loaded: LoadedConfig) -> int:
    return most_connections(len(loaded.specs), sum(spec.slots for spec in loaded.specs))
