"""MCP over the standard streams of a program that we start: the transport below the SDK's session.

The SDK's own transport holds the program in the event loop, whose buffers cannot be handed over. This one uses bare
descriptors, and always knows the partly read and written messages: ``hand_over_link`` returns them, ``adopt``
continues.

The program is on a tether, as engines are under a guardian: it must not outlive us, nor leave processes behind.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import (
    INTERNAL_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from workers.process import guardian
from workers.process.handed_over import HeldLink
from workers.process.piped_child import PipedChild, read_some
from workers.process.registry import run_id
from workers.tools.results import MAX_RESULT_BYTES, ResultTooLarge, check_document
from workers.tools.server_log import StderrLog

MOST_DIGITS: Final = 18
CANCELLED: Final = "notifications/cancelled"
Id = int | str
FLUSH_S: Final = 0.5  # for the session's messages to be written, before the program's standard input is closed
EXIT_S: Final = 2.0  # for the program to end by itself then
TERM_S: Final = 2.0  # for its group to end by SIGTERM, which ends the tether's whole tree
KILL_S: Final = 2.0
SHOWN_CHARS: Final = 200
MAX_LINE_BYTES: Final = MAX_RESULT_BYTES
ANSWERED: Final = re.compile(rb'\s*\{(?:\s*"jsonrpc"\s*:\s*"2.0"\s*,)?\s*"id"\s*:\s*(\d{1,18})\s*,')
Incoming = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]
logger = logging.getLogger(__name__)


class MessageIds:
    """``base`` is the earlier program's last number, ``last`` the highest that the server has been sent."""

    def __init__(self, base: int = 0) -> None:
        self.base = self.last = base

    def __repr__(self) -> str:
        return f"<MessageIds {self.base} to {self.last}>"

    def told(self, own: Id) -> Id:
        """Return the number of a request for the server."""
        if not isinstance(own, int):  # chosen by the caller, which the SDK allows and we do not use
            return own
        self.last = max(self.last, self.base + own)
        return self.base + own

    def cancelled(self, params: dict[str, object]) -> dict[str, object]:
        """Return the parameters of ``notifications/cancelled`` with the server's number."""
        own = params.get("requestId")
        return {**params, "requestId": self.base + own} if isinstance(own, int) else params

    def own(self, foreign: Id | None) -> Id | None:
        """Return which of the session's requests an answer is for; None if for none of them."""
        number = (
            int(foreign)
            if isinstance(foreign, str) and foreign.isascii() and foreign.isdecimal() and len(foreign) <= MOST_DIGITS
            else foreign
        )
        if not isinstance(number, int):
            return foreign
        return number - self.base if number > self.base else None


class StdioLink:
    """One program; ``open`` is entered once, and ends the program on leaving."""

    def __init__(self, name: str, child: PipedChild, log: StderrLog, left: HeldLink | None = None) -> None:
        self._name = name
        self._child = child
        self._log = log
        self._ids = MessageIds(base=left.last_id if left else 0)
        self._unsent = bytearray(left.unsent if left else b"")
        self._received = bytearray(left.received if left else b"")
        log.begin(left.said if left else b"")

    def __repr__(self) -> str:
        return f"<StdioLink {self._name} {self._child!r}>"

    @classmethod
    def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: StderrLog) -> "StdioLink":
        """Start a program.

        Raises:
            OSError: its tether cannot be started.
            ValueError: an argument holds a null.
        """
        tether = [sys.executable, "-I", "-S", str(Path(guardian.__file__)), guardian.TETHER, str(os.getpid())]
        child = PipedChild.start([*tether, *command], {**env, guardian.MARK_TO_BE: run_id()})
        return cls(name, child, log)

    @classmethod
    def adopt(cls, name: str, held: HeldLink, log: StderrLog) -> "StdioLink":
        """Go on with a program that an earlier program of this process started."""
        return cls(name, PipedChild(held.pid, *held.descriptors), log, held)

    @property
    def pid(self) -> int:
        """The process of the tether."""
        return self._child.pid

    def hand_over_link(self) -> HeldLink | None:
        """Return the link for the next program of this process to adopt; None if it has died or is ending."""
        identity = self._child.identity()
        if identity is None:
            return None
        stdin_fd, stdout_fd, stderr_fd = self._child.fds
        return HeldLink(
            pid=identity.pid,
            started=identity.started,
            stdin_fd=stdin_fd,
            stdout_fd=stdout_fd,
            stderr_fd=stderr_fd,
            unsent=bytes(self._unsent),
            received=bytes(self._received),
            said=self._log.half,
            last_id=self._ids.last,
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Streams]:
        """Give the session its streams for a block; then end the program and its whole tree."""
        to_session, of_program = anyio.create_memory_object_stream[Incoming](0)
        to_program, of_session = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with anyio.create_task_group() as tasks:
                written = anyio.Event()
                # Shielded: a program that cannot write, or has not read our last messages, does not end by itself.
                reading, writing = anyio.CancelScope(shield=True), anyio.CancelScope(shield=True)
                tasks.start_soon(_within, reading, self._read_all, to_session)
                tasks.start_soon(_within, writing, self._write, of_session, to_session, written)
                try:
                    yield of_program, to_program
                finally:
                    with anyio.CancelScope(shield=True):
                        of_program.close()  # later output is read and dropped
                        to_program.close()
                        with anyio.move_on_after(FLUSH_S):
                            await written.wait()
                        writing.cancel()
                        await written.wait()
                        await self._end()
                    reading.cancel()
        finally:
            for stream in (to_session, of_program, to_program, of_session):
                stream.close()
            self._log.finish(self._child.fds[2])
            self._child.close()

    async def _end(self) -> None:
        """End the program in the order of the protocol: its input's end, SIGTERM, SIGKILL."""
        self._child.let_go()
        for number, limit_s in ((None, EXIT_S), (signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            if number is signal.SIGKILL:
                self._child.kill()  # the kernel kills the program with it, and ``patrol`` the rest of its tree
            elif number is not None:
                self._child.signal_group(number)
            with anyio.move_on_after(limit_s):
                await self._child.wait()
                return
        logger.error("MCP server %s: process %d does not die", self._name, self._child.pid)

    async def _read_all(self, session: MemoryObjectSendStream[Incoming]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._log.follow, self._child.fds[2])
            tasks.start_soon(self._read, session)

    async def _read(self, session: MemoryObjectSendStream[Incoming]) -> None:
        """Give the session one message after another; once it takes none, drop them."""
        with session, suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            at = 0  # no line ends before it
            while True:
                while (end := self._received.find(b"\n", at)) >= 0:
                    message = self._message(bytes(self._received[:end]))
                    if message is not None:
                        await session.send(message)
                    del self._received[: end + 1]
                    at = 0
                if len(self._received) > MAX_LINE_BYTES:
                    del self._received[MAX_LINE_BYTES + 1 :]  # no more of it is kept: it is refused at its end
                at = len(self._received)
                data = await read_some(self._child.fds[1])
                if not data:
                    return
                self._received += data
        while await read_some(self._child.fds[1]):
            pass

    def _message(self, line: bytes) -> Incoming | None:
        try:
            check_document(line)
        except ResultTooLarge as error:
            return self._too_large(line, error)
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError as error:
            shown = line[:SHOWN_CHARS].decode("utf-8", "replace")
            logger.warning("MCP server %s: this is not a message: %r", self._name, shown)
            return error
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            own = self._ids.own(message.id)
            if own is None:
                logger.info("MCP server %s: an answer came too late: an earlier program asked", self._name)
                return None
            message = message.model_copy(update={"id": own})
        return SessionMessage(message)

    def _too_large(self, line: bytes, error: ResultTooLarge) -> Incoming | None:
        """Return the failure of the request that a line answers, if its beginning shows which."""
        logger.warning("MCP server %s: %s", self._name, error)
        answered = ANSWERED.match(line)
        own = None if answered is None else self._ids.own(int(answered[1]))
        if own is None:
            return None
        return SessionMessage(
            JSONRPCError(jsonrpc="2.0", id=own, error=ErrorData(code=INTERNAL_ERROR, message=str(error)))
        )

    async def _write(
        self,
        session: MemoryObjectReceiveStream[SessionMessage],
        to_session: MemoryObjectSendStream[Incoming],
        written: anyio.Event,
    ) -> None:
        """Write one message after another; if the program takes none, the session sees the connection's end."""
        try:
            with session:
                await self._flush()  # a message that an earlier program began
                async for each in session:
                    self._unsent += self._line(each.message)
                    await self._flush()
        except OSError:
            to_session.close()
        finally:
            written.set()

    async def _flush(self) -> None:
        while self._unsent:
            try:
                count = os.write(self._child.fds[0], self._unsent)
            except BlockingIOError:
                await anyio.wait_writable(self._child.fds[0])
            else:
                del self._unsent[:count]

    def _line(self, message: JSONRPCMessage) -> bytes:
        if isinstance(message, JSONRPCRequest):
            message = message.model_copy(update={"id": self._ids.told(message.id)})
        elif isinstance(message, JSONRPCNotification) and message.method == CANCELLED and message.params:
            message = message.model_copy(update={"params": self._ids.cancelled(dict(message.params))})
        return message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"


async def _within(scope: anyio.CancelScope, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
    with scope:
        await task(*arguments)
