"""The document that one program of the service leaves to the next across an exec, and its version."""

import os
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

from workers.process.identity import EngineExit, ProcessId
from workers.spans import SpanGeneration

VERSION: Final = 5  # version of the document's form; another one is refused before anything is handed over


class HeldGuardian(Struct, frozen=True, kw_only=True):
    """A guardian for another program to adopt; the descriptors are ours, and stay open across an exec."""

    pid: int
    started: int  # in clock ticks: the pid alone proves nothing
    orders_fd: int
    output_fd: int
    reports_fd: int
    output: bytes = b""  # the beginning of a frame whose end is still in the pipe
    reports: bytes = b""

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The descriptors that must stay open."""
        return self.orders_fd, self.output_fd, self.reports_fd


class HeldProcess(Struct, frozen=True, kw_only=True):
    """An engine under its guardian, for another program in this process to adopt."""

    guardian: HeldGuardian
    pid: int
    started: int  # in clock ticks

    @property
    def is_as_told(self) -> bool:
        """Whether both processes are still the same."""
        engine = ProcessId(pid=self.pid, started=self.started)
        return engine.is_alive and ProcessId(pid=self.guardian.pid, started=self.guardian.started).is_alive


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of output; ``number`` counts all lines of the worker from 1, ``stream`` is 1, 2, or 0 for our own."""

    number: int
    incarnation: int
    stream: int
    at_utc: datetime
    text: str


class HeldLog(Struct, frozen=True, kw_only=True):
    """All lines of a worker, for another program to continue; ``partial`` is the unfinished line of each stream."""

    incarnation: int
    number: int
    bytes_taken: int
    previous: list[LogLine]
    current: list[LogLine]
    partial: dict[int, bytes]


class HeldEngine(Struct, frozen=True, kw_only=True):
    """A running engine; ``key`` is the key that it requires, None without one.

    ``generation`` is that of its span, None without one.
    """

    incarnation: int
    process: HeldProcess
    key: str | None
    was_ready: bool
    holds: list[str]  # reasons that its worker is drained for
    failed_at: list[float]
    paused_at: list[float]
    last_exit: EngineExit | None
    log: HeldLog
    generation: SpanGeneration | None = None


class HeldPace(Struct, frozen=True, kw_only=True):
    """The measured and learned speed of an engine."""

    rates: list[float]
    tokens_a_char: float
    steps_s: list[float]
    errors: list[float]


class HeldWorker(Struct, frozen=True, kw_only=True):
    """A worker with its engine; ``launch`` is the digest of the engine's launch, without its adapters.

    ``adapters`` are the engine's, in its order, each with its path; ``numbers`` are vLLM's own for them.
    """

    id: str
    model: str
    launch: str
    engine: HeldEngine
    pace: HeldPace
    adapters: Mapping[str, str]
    numbers: Mapping[str, int | None]
    weights: int | None = None  # their version; None for an engine without versions


class HeldFleet(Struct, frozen=True, kw_only=True):
    """All workers that have engines; ``run`` is the mark on these engines.

    ``scratch`` are folders, by model, into which engines write their progress with new weights. ``unloaded`` workers
    get no engine. ``seat`` is the node's name in spans.
    """

    run: str
    workers: list[HeldWorker]
    scratch: dict[str, str] = msgspec.field(default_factory=dict)
    unloaded: list[str] = msgspec.field(default_factory=list)
    seat: str | None = None

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that must stay open across the exec."""
        return [fd for worker in self.workers for fd in worker.engine.process.guardian.descriptors]

    @property
    def guardians(self) -> set[ProcessId]:
        """The processes above the engines."""
        held = [worker.engine.process.guardian for worker in self.workers]
        return {ProcessId(pid=each.pid, started=each.started) for each in held}


class HeldTool(Struct, frozen=True, kw_only=True):
    """A tool as its server listed it; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, object]


class HeldLink(Struct, frozen=True, kw_only=True):
    """A tether's process, and our ends of its streams, which stay open across an exec.

    ``unsent`` are bytes of our messages that its pipe has not taken, ``received`` bytes of its messages that the
    session has not got, ``said`` the beginning of a line on its standard error. ``last_id`` is our highest request
    number: later requests are numbered above it, and answers to those up to it are dropped.
    """

    pid: int
    started: int  # in clock ticks: the pid alone proves nothing
    stdin_fd: int
    stdout_fd: int
    stderr_fd: int
    unsent: bytes = b""
    received: bytes = b""
    said: bytes = b""
    last_id: int = 0

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The descriptors that must stay open."""
        return self.stdin_fd, self.stdout_fd, self.stderr_fd

    @property
    def identity(self) -> ProcessId:
        """The process of the tether."""
        return ProcessId(pid=self.pid, started=self.started)


class HeldServer(Struct, frozen=True, kw_only=True):
    """One server: ``launch`` digests its command and environment, ``name`` and ``model`` say where it is configured.

    ``negotiated`` is the server's answer to ``initialize`` as JSON, or to ``server/discover`` if ``is_discovered``.
    """

    model: str
    name: str
    launch: str
    link: HeldLink
    negotiated: str
    is_discovered: bool
    tools: list[HeldTool]

    def fault(self, launch: str) -> str | None:
        """Return why the next program, which would start it as ``launch``, cannot take it over; None if it can."""
        if launch != self.launch:
            return "it would be started differently"
        return None if self.link.identity.is_alive else "it has died"

    def let_go(self) -> None:
        """Close our descriptors of it; its process is ended like any leftover."""
        for fd in self.link.descriptors:
            os.close(fd)


class HeldStream(Struct, frozen=True, kw_only=True):
    """A connection in the middle of a streamed answer; ``request`` is JSON of the service."""

    fd: int
    request: bytes


class Handover(Struct, frozen=True, kw_only=True):
    """The whole document; ``upgrades`` counts upgrades, this one included, ``at`` is its time in monotonic seconds.

    ``lock_fd`` holds the state directory. ``connections`` are those of idle clients.
    Clients of ``streams`` have the beginning of an answer.
    """

    version: int = VERSION
    roundhouse: str  # the version that is leaving
    upgrades: int
    at: float
    listener_fd: int
    lock_fd: int
    connections: list[int]
    streams: list[HeldStream] = []
    fleet: HeldFleet
    servers: list[HeldServer]  # MCP servers over stdio

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that must stay open."""
        of_servers = [fd for server in self.servers for fd in server.link.descriptors]
        streams = [stream.fd for stream in self.streams]
        return [self.listener_fd, self.lock_fd, *self.connections, *streams, *self.fleet.descriptors, *of_servers]
