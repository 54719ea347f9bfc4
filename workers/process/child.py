"""One engine process under its guardian, from exec to an empty tree."""

import json
import logging
import os
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

import anyio
import msgspec

from workers.errors import SpawnFailed
from workers.process import guardian
from workers.process.engine_output import FRAME_HEAD
from workers.process.handed_over import HeldGuardian, HeldProcess
from workers.process.identity import EngineExit, Parted, ProcessId
from workers.process.orphans import end_orphans
from workers.process.piped_child import PipedChild, read_some
from workers.process.registry import run_id
from workers.spans import MemberFacts

REPORT_LIMIT_BYTES: Final = 64 * 1024
LEAVE_LIMIT_S: Final = 30.0  # for a tree to be gone after the block that started it
DIED_CHARS: Final = 200
LAST_LIMIT_S: Final = 1.0  # for the end of a guardian that had to be killed itself
OnOutput = Callable[[int, bytes], None]  # stream 1 or 2, and the engine's output on it
logger = logging.getLogger(__name__)


class GuardianLink(PipedChild):
    """A guardian: its standard input is the lifeline, its output and error carry output and reports."""

    def __init__(self, pid: int, orders_fd: int, output_fd: int, reports_fd: int, reports: bytes = b"") -> None:
        super().__init__(pid, orders_fd, output_fd, reports_fd)
        self._report = bytearray(reports)

    @classmethod
    def adopt(cls, held: HeldGuardian) -> Self:
        """Go on with a guardian that an earlier program in this process started."""
        return cls(held.pid, *held.descriptors, held.reports)

    def hand_over_link(self, output: bytes) -> HeldGuardian | None:
        """Return the guardian for another program to adopt, ``output`` being a partly read frame; None if it died."""
        identity = self.identity()
        if identity is None:
            return None
        orders_fd, output_fd, reports_fd = self.fds
        return HeldGuardian(
            pid=self.pid,
            started=identity.started,
            orders_fd=orders_fd,
            output_fd=output_fd,
            reports_fd=reports_fd,
            output=output,
            reports=bytes(self._report),
        )

    def order(self, order: int) -> None:
        """Send one order; a guardian that is gone or does not read is left to its end."""
        if self.fds[0] >= 0:
            try:
                os.write(self.fds[0], bytes([order]))
            except (BrokenPipeError, BlockingIOError):
                return

    async def read_output(self) -> bytes:
        """Read the engine's output, in frames as they come; empty at the end."""
        return await read_some(self.fds[1])

    async def read_report(self, limit_bytes: int) -> bytes:
        """Return the next line of its reports; empty at the end, or if a line is longer than the limit."""
        while b"\n" not in self._report:
            data = await read_some(self.fds[2])
            self._report += data
            if not data or len(self._report) > limit_bytes:
                return b""
        line, _, rest = bytes(self._report).partition(b"\n")
        self._report = bytearray(rest)
        return line


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command: argv, the whole environment, and its working directory, None for our own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: str | None = None
    span: Mapping[str, object] | None = None  # a member's place in its span (``lifelines.Lifelines``)


class OutputFrames:
    """Splits the guardian's frames, however the pipe has cut them; ``begun`` is the beginning of one."""

    def __init__(self, on_output: OnOutput, begun: bytes = b"") -> None:
        self._on_output = on_output
        self._held = bytearray(begun)

    @property
    def begun(self) -> bytes:
        """The beginning of an unfinished frame."""
        return bytes(self._held)

    def feed(self, data: bytes) -> None:
        """Cut the bytes of the pipe into frames."""
        held = self._held
        held += data
        head = struct.calcsize(FRAME_HEAD)
        at = 0
        while len(held) - at >= head:
            stream, size = struct.unpack_from(FRAME_HEAD, held, at)
            if len(held) - at - head < size:
                break
            self._on_output(stream, bytes(held[at + head : at + head + size]))
            at += head + size
        del held[:at]


class EngineProcess:
    """The engine's main process and all its descendants; made by ``run_engine`` and ``adopt_engine``."""

    def __init__(
        self, link: GuardianLink, on_output: OnOutput, pid: int = 0, output: bytes = b"", program: str = ""
    ) -> None:
        self._guardian = link
        self._program = program
        self._frames = OutputFrames(on_output, output)
        self.pid = pid
        self.exit = EngineExit()
        self.members: dict[int, MemberFacts] = {}  # other members of its span, by rank
        self._gone = anyio.Event()
        self._drained = anyio.Event()
        self._unread = anyio.Event()  # no task reads its pipes any more
        self._is_ended = False

    @property
    def guardian_pid(self) -> int:
        """The process above the engine's whole tree."""
        return self._guardian.pid

    def __repr__(self) -> str:
        return f"<EngineProcess pid={self.pid or None} gone={self.is_gone}>"

    @property
    def is_gone(self) -> bool:
        """Whether no process of the tree is left."""
        return self._gone.is_set()

    async def terminate(self) -> None:
        """Send SIGTERM to the engine's group."""
        self._guardian.order(guardian.ORDER_TERMINATE)

    def renew(self, *, has_lease: bool) -> None:
        """Tell the guardian of a span's member that this service lives, and whether its lease is valid."""
        self._guardian.order(guardian.ORDER_LEASE if has_lease else guardian.ORDER_SERVICE)

    def kill(self) -> None:
        """Kill the tree; its end comes as usual."""
        self._guardian.order(guardian.ORDER_KILL)

    async def wait_gone(self) -> EngineExit:
        """Return when no process of the tree is left."""
        await self._gone.wait()
        return self.exit

    async def end(self, limit_s: float) -> None:
        """Release the lifeline, and wait for the tree's death and its last output; shielded, bounded, done once."""
        if self._is_ended:
            return
        self._is_ended = True
        with anyio.CancelScope(shield=True):
            self._guardian.order(guardian.ORDER_KILL)  # while a fork holds the pipe open, its end alone does not show
            self._guardian.let_go()
            with anyio.move_on_after(limit_s):
                await self._wait_ended()
                return
            self._guardian.kill()  # it hangs; PDEATHSIG takes the engine with it
            with anyio.move_on_after(LAST_LIMIT_S):
                await self._wait_ended()

    async def _wait_ended(self) -> None:
        await self._guardian.wait()
        if not self.pid:
            self._gone.set()  # it never started
            return
        await self._unread.wait()
        # At the end of the event loop itself all its tasks are cancelled at once, the readers too.
        if not self.is_gone:
            await self.follow()
        if not self._drained.is_set():
            await self.drain()

    async def read_pipes(self) -> None:
        """Read reports and output to their ends."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.drain)
                tasks.start_soon(self.follow)
        finally:
            self._unread.set()

    async def wait_started(self) -> None:
        """Return when the engine's program is running.

        Raises:
            SpawnFailed: it cannot be executed.
        """
        report = await self._next_report()
        if report.get("event") != "started":
            fault = report.get("message") or report.get("text") or "the guardian ended"
            raise SpawnFailed(f"{self._program} cannot be run: {fault}")
        self.pid = _integer(report, "pid")

    async def follow(self) -> None:
        """Read the guardian's reports until the tree is gone."""
        while report := await self._next_report():
            match report.get("event"):
                case "exited":
                    self.exit = _exit(report)
                case "empty":
                    self._gone.set()
                case "member":
                    rank = _integer(report, "rank")
                    self.members[rank] = facts_of(report, self.members.get(rank))
                case _:
                    logger.error("the guardian of engine %d says: %s", self.pid, report.get("text", report))
        if not self.is_gone:
            await self.end_without_guardian()
            logger.warning("the guardian of engine %d was killed; nothing of the engine is left", self.pid)

    async def end_without_guardian(self) -> None:
        """Return when no process of an engine with a dead guardian is left, however long that takes."""
        # The kernel closes a dead process's pipes before it gives its children to us: they are ours once it is gone.
        await self._guardian.wait()
        # PDEATHSIG has killed the main process, which led the session; its children are ours now.
        while not await end_orphans(self.pid):
            logger.error("processes of engine %d do not die", self.pid)
        self._gone.set()

    async def drain(self) -> None:
        """Drain the engine's output, to its end."""
        while data := await self._guardian.read_output():
            self._frames.feed(data)
        self._drained.set()

    def hand_over_process(self) -> HeldProcess | None:
        """Return the processes for another program in this process to adopt; None if they are ending or gone."""
        identity = ProcessId.of(self.pid) if self.pid and not (self._is_ended or self.is_gone) else None
        link = self._guardian.hand_over_link(self._frames.begun)
        if identity is None or not identity.is_alive or link is None:
            return None
        return HeldProcess(guardian=link, pid=self.pid, started=identity.started)

    def close(self) -> None:
        """Close the pipes."""
        self._guardian.close()

    async def _next_report(self) -> dict[str, object]:
        line = await self._guardian.read_report(REPORT_LIMIT_BYTES)
        if not line:
            return {}
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        return report if isinstance(report, dict) else {"text": line.decode("utf-8", "replace")}


@asynccontextmanager
async def run_engine(
    command: Command, on_output: OnOutput, leave_limit_s: float = LEAVE_LIMIT_S
) -> AsyncIterator[EngineProcess]:
    """Start ``command`` under a guardian; on leaving the block, for whatever reason, the whole tree is gone.

    ``on_output`` takes the engine's output as it comes. An error of the block leaves in a group. A process that hangs
    in the kernel cannot be killed: after ``leave_limit_s`` the block is left all the same, and ``is_gone`` is false.

    Raises:
        SpawnFailed: the program cannot be executed.
    """
    role = [guardian.GUARD, str(os.getpid())]
    argv = [sys.executable, "-I", "-S", str(Path(guardian.__file__)), *role, *command.argv]
    # A session of its own: a Ctrl-C in our terminal is ours to handle, and must not reach the guardian.
    env = {**command.env, guardian.MARK_TO_BE: run_id()}
    if command.folder is not None:
        env[guardian.FOLDER] = command.folder
    if command.span is not None:
        env[guardian.SPAN] = json.dumps(command.span)
    guardian.become_subreaper()
    try:
        link = GuardianLink.start(argv, env)
    except (OSError, ValueError) as error:
        raise SpawnFailed(f"cannot start a process: {error}") from error
    async with _hold(EngineProcess(link, on_output, program=command.argv[0]), leave_limit_s) as engine:
        yield engine


@asynccontextmanager
async def adopt_engine(
    held: HeldProcess, on_output: OnOutput, leave_limit_s: float = LEAVE_LIMIT_S
) -> AsyncIterator[EngineProcess]:
    """Go on with an engine that an earlier program in this process started, as ``run_engine`` does with its own.

    One that has died meanwhile ends like any other: its guardian's reports wait in the pipe.
    """
    guardian.become_subreaper()
    link = GuardianLink.adopt(held.guardian)
    async with _hold(EngineProcess(link, on_output, held.pid, held.guardian.output), leave_limit_s) as engine:
        yield engine


@asynccontextmanager
async def _hold(engine: EngineProcess, leave_limit_s: float) -> AsyncIterator[EngineProcess]:
    try:
        if not engine.pid:
            await engine.wait_started()
        async with anyio.create_task_group() as tasks:
            # Shielded: the guardian's reports are needed most while the block is being cancelled.
            readers = anyio.CancelScope(shield=True)
            tasks.start_soon(_read, engine, readers)
            try:
                yield engine
            finally:
                await engine.end(leave_limit_s)
                readers.cancel()
    finally:
        await engine.end(leave_limit_s)
        engine.close()


async def _read(engine: EngineProcess, scope: anyio.CancelScope) -> None:
    with scope:
        await engine.read_pipes()


def _exit(report: Mapping[str, object]) -> EngineExit:
    status = _integer(report, "status")
    rss, cpu_s = report.get("max_rss_bytes"), report.get("cpu_s")
    return EngineExit(
        status=status if status >= 0 else None,
        signal=-status if status < 0 else None,
        max_rss_bytes=rss if isinstance(rss, int) else None,
        cpu_s=float(cpu_s) if isinstance(cpu_s, int | float) else None,
        parted=_parted(report),
    )


def _parted(report: Mapping[str, object]) -> Parted | None:
    member, because = report.get("member"), report.get("because")
    if not isinstance(member, int) or not isinstance(because, str):
        return None
    return Parted(member=member, because=because, is_outside=bool(report.get("outside")))


def facts_of(report: Mapping[str, object], before: MemberFacts | None) -> MemberFacts:
    """Return the facts of a guardian's report on another member of its span."""
    now, cpu_s = time.monotonic(), report.get("cpu_s")
    spent = float(cpu_s) if isinstance(cpu_s, int | float) else 0.0
    stopped, service_s, died = report.get("stopped"), report.get("service_s"), report.get("died")
    return MemberFacts(
        cpu_s=spent,
        stopped=tuple(map(str, stopped)) if isinstance(stopped, list) else (),
        service_s=float(service_s) if isinstance(service_s, int | float) else 0.0,
        heard_at=now,
        died=str(died)[:DIED_CHARS] if died is not None else None,
        moved_at=now if before is None or spent > before.cpu_s else before.moved_at,
    )


def _integer(report: Mapping[str, object], field: str) -> int:
    value = report.get(field)
    if not isinstance(value, int):
        raise SpawnFailed(f"the guardian's report has no {field}: {report}")
    return value
