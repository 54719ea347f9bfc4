"""One engine process under its guardian, from exec to an empty tree."""

import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from workers import guardian
from workers.errors import SpawnFailed, StopTimedOut

REPORT_LIMIT_BYTES: Final = 64 * 1024
LEAVE_LIMIT_S: Final = 30.0  # for a tree to be gone when the block that started it is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to execute: argv, and the whole environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExit:
    """How the engine's main process ended: a status, or a signal, or neither where it is not known."""

    status: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        """Say it in words."""
        if self.signal is not None:
            return f"killed by {signal.Signals(self.signal).name}"
        return "ended, nobody knows how" if self.status is None else f"exited with status {self.status}"


class EngineProcess:
    """The engine's main process and all its descendants; made by ``run_engine``."""

    def __init__(self, process: Process) -> None:
        self._guardian = process
        assert process.stderr is not None  # noqa: S101 - asked for in run_engine
        self._reports = BufferedByteReceiveStream(process.stderr)
        self.pid = 0
        self.exit = EngineExit()
        self._is_gone = anyio.Event()

    def __repr__(self) -> str:
        """State the process."""
        return f"<EngineProcess pid={self.pid or None} gone={self._is_gone.is_set()}>"

    async def terminate(self) -> None:
        """Send SIGTERM to the engine's group."""
        await self._order(guardian.ORDER_TERMINATE)

    async def kill(self) -> None:
        """Kill the whole tree."""
        await self._order(guardian.ORDER_KILL)

    async def wait_gone(self) -> EngineExit:
        """Return when no process of the tree is left."""
        await self._is_gone.wait()
        return self.exit

    async def wait_started(self) -> None:
        """Return when the engine's program is running.

        Raises:
            SpawnFailed: it cannot be executed.
        """
        report = await self._next_report()
        if report.get("event") != "started":
            raise SpawnFailed(str(report.get("message") or report.get("text") or "the guardian ended"))
        self.pid = _integer(report, "pid")

    async def follow(self) -> None:
        """Take the guardian's reports until the tree is gone."""
        while report := await self._next_report():
            match report.get("event"):
                case "exited":
                    status = _integer(report, "status")
                    self.exit = EngineExit(signal=-status) if status < 0 else EngineExit(status=status)
                case "empty":
                    break
                case _:
                    continue  # the guardian's own traceback: its end is what counts
        self._is_gone.set()

    async def _order(self, order: int) -> None:
        assert self._guardian.stdin is not None  # noqa: S101 - asked for in run_engine
        try:
            await self._guardian.stdin.send(bytes([order]))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the guardian is gone, and the tree with it

    async def _next_report(self) -> dict[str, object]:
        try:
            line = await self._reports.receive_until(b"\n", REPORT_LIMIT_BYTES)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError, anyio.BrokenResourceError):
            return {}
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        return report if isinstance(report, dict) else {"text": line.decode("utf-8", "replace")}


@asynccontextmanager
async def run_engine(command: Command, on_output: Callable[[bytes], None]) -> AsyncIterator[EngineProcess]:
    """Start ``command`` under a guardian; when the block is left, however it is left, the whole tree is gone.

    ``on_output`` takes what the engine prints on both streams, as it comes.

    Raises:
        SpawnFailed: the program cannot be executed.
        StopTimedOut: the tree did not die when the block was left.
    """
    argv = [sys.executable, "-I", "-S", str(Path(guardian.__file__)), *command.argv]
    # A session of its own: a Ctrl-C in our terminal is ours to handle, and must not reach the guardian.
    with anyio.CancelScope(shield=True):  # a process that is half started has no owner yet
        process = await anyio.open_process(argv, env=command.env, start_new_session=True)
    engine = EngineProcess(process)
    assert process.stdin is not None  # noqa: S101 - open_process pipes all three
    assert process.stdout is not None  # noqa: S101
    try:
        await engine.wait_started()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.follow)
            tasks.start_soon(_drain, process.stdout, on_output)
            try:
                yield engine
            finally:
                with anyio.CancelScope(shield=True):
                    await process.stdin.aclose()  # the lifeline: the guardian kills what is left
                    with anyio.move_on_after(LEAVE_LIMIT_S) as limit:
                        await engine.wait_gone()
                        await process.wait()
                tasks.cancel_scope.cancel()
            if limit.cancelled_caught:
                raise StopTimedOut(f"processes of engine {engine.pid} have not died within {LEAVE_LIMIT_S:g} s")
    finally:
        with anyio.CancelScope(shield=True):
            await process.stdin.aclose()
            with anyio.move_on_after(LEAVE_LIMIT_S):
                await process.wait()
            await process.stdout.aclose()
            assert process.stderr is not None  # noqa: S101
            await process.stderr.aclose()


async def _drain(stream: ByteReceiveStream, on_output: Callable[[bytes], None]) -> None:
    try:
        async for data in stream:
            on_output(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return


def _integer(report: Mapping[str, object], field: str) -> int:
    value = report.get(field)
    if not isinstance(value, int):
        raise SpawnFailed(f"the guardian's report has no {field}: {report}")
    return value
