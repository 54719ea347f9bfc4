"""The service: HTTP over a running node, from the first signal to the last process."""

import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
import uvicorn
from fastapi import FastAPI

from service.api.app import build_app
from service.api.door.connections import Door, most_connections
from service.config.schema import Config
from service.conversations.callers import Caller, shares_of
from service.errors import ConfigError
from service.node.node import open_node
from service.node.retention import release_always
from service.node.webhooks import Webhooks
from service.systemd import ServiceManager
from workers.spec import WorkerSpec

HTTP_GRACE_S: Final = 5  # for answers under way when everything else has stopped; streams were told to end before
BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 60  # longer than clients keep a connection that they may be about to use
TICKS_A_SECOND: Final = 10  # of uvicorn's main loop
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


class _Server(uvicorn.Server):
    """uvicorn without hands on our signals, and with a clock for its connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Do what is done ten times a second."""
        if counter % TICKS_A_SECOND == 0:
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, Door):
                    connection.tick()
        return await super().on_tick(counter)


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
) -> None:
    """Serve until SIGTERM or SIGINT: once drains and stops, twice stops at once. No process is left.

    ``roots`` are where callers may have adapters and checkpoints read from, ``callers`` who may ask, by the digests of
    their keys.

    Raises:
        StoreError: the store cannot be opened, or failed (then in a group).
    """
    spare_the_collector()
    stop, hurry = anyio.Event(), anyio.Event()
    manager = ServiceManager.of(os.environ)
    # Signals are ours from before the first engine to after the last.
    with listener, anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as watching:
            watching.start_soon(_watch_signals, signals, stop, hurry)
            watching.start_soon(manager.feed)
            async with (
                open_node(config, specs, state_dir, shares_of(callers.values())) as node,
                anyio.create_task_group() as keeping,
                anyio.create_task_group() as tasks,
            ):
                await node.intake.claim_first()
                tasks.start_soon(node.intake.run)
                keeping.start_soon(Webhooks(node.store, config.webhooks).run)
                keeping.start_soon(release_always, node.store, config.store)
                most = most_connections(len(specs), sum(spec.slots for spec in specs))
                server = _http_server(build_app(node, config, roots, callers), most)
                tasks.start_soon(_run_http, server, listener)
                serving = "serving at http://{}:{}".format(*listener.getsockname()[:2])
                logger.info(serving)
                manager.tell_ready(serving)
                logger.info("the dashboard is at %s", page_address(listener))
                await stop.wait()
                draining = f"draining for up to {config.server.drain_s:g} s"
                logger.info(draining)
                manager.tell_stopping(draining)
                await node.shut_down(config.server.drain_s, hurry)
                server.should_exit = True
                keeping.cancel_scope.cancel()
            watching.cancel_scope.cancel()
    logger.info("stopped")


def page_address(listener: socket.socket) -> str:
    """Return what a browser of this machine is given to open the dashboard."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - what is listened on is no address to ask
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


async def _watch_signals(signals: AsyncIterator[signal.Signals], stop: anyio.Event, hurry: anyio.Event) -> None:
    async for number in signals:
        logger.info("%s: %s", number.name, "stopping at once" if stop.is_set() else "stopping; once more stops at once")
        (hurry if stop.is_set() else stop).set()


def _http_server(app: FastAPI, most: int) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            http=Door,
            ws="none",  # an upgrade would leave the door
            limit_concurrency=most,
            proxy_headers=False,  # no proxy between us and a client is trusted
            timeout_keep_alive=KEEP_ALIVE_S,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=HTTP_GRACE_S,
        )
    )


async def _run_http(server: _Server, listener: socket.socket) -> None:
    await server.serve(sockets=[listener])
    if not server.should_exit:
        raise RuntimeError("the HTTP server ended by itself")
