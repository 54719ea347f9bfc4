"""Our side of one guardian: its process, the lifeline, and the pipes of its output and its reports.

Made of bare descriptors, so that another program in this same process can go on with them: ``held`` tells what they
are and what has been read of them in part, ``take`` goes on from there.
"""

import fcntl
import os
import signal
from collections.abc import Mapping
from typing import Final, Self

import anyio
from msgspec import Struct

from workers.process.identity import ProcessId

READ_BYTES: Final = 64 * 1024
FIRST_FD: Final = 3  # a child's ends must not be what they are copied to
POLL_S: Final = 0.02  # for the end of a guardian where the kernel has no pidfds


class HeldGuardian(Struct, frozen=True, kw_only=True):
    """A guardian as another program in this process finds it; the descriptors are ours, and stay open over an exec."""

    pid: int
    started: int  # in clock ticks: the pid alone proves nothing
    orders_fd: int
    output_fd: int
    reports_fd: int
    output: bytes = b""  # the beginning of a frame whose end is still in the pipe
    reports: bytes = b""

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """What has to stay open."""
        return self.orders_fd, self.output_fd, self.reports_fd


class GuardianLink:
    """One process and three pipes; used in the event loop, closed once."""

    def __init__(self, pid: int, orders_fd: int, output_fd: int, reports_fd: int, reports: bytes = b"") -> None:
        self.pid = pid
        self._orders, self._output, self._reports = orders_fd, output_fd, reports_fd
        self._report = bytearray(reports)
        self._is_collected = False
        self._waiting = anyio.Lock()
        for fd in (orders_fd, output_fd, reports_fd):
            os.set_blocking(fd, False)
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # a kernel or a sandbox without pidfds, or it is collected already
            self._pidfd = -1

    def __repr__(self) -> str:
        return f"<GuardianLink {self.pid} collected={self._is_collected}>"

    @classmethod
    def start(cls, argv: list[str], env: Mapping[str, str]) -> Self:
        """Start a guardian in a session of its own, on three new pipes.

        Raises:
            OSError: it cannot be started.
            ValueError: an argument holds a null.
        """
        ours: list[int] = []
        theirs: list[int] = []
        try:
            for is_read in (False, True, True):
                read_fd, write_fd = os.pipe()
                ours.append(read_fd if is_read else write_fd)
                low = write_fd if is_read else read_fd
                theirs.append(low)
                theirs[-1] = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
                os.close(low)
            streams = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(theirs)]
            # From our main thread, as all of the event loop: a signal of the parent's death is tied to the thread.
            pid = os.posix_spawn(argv[0], argv, env, file_actions=streams, setsid=True)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        orders_fd, output_fd, reports_fd = ours
        return cls(pid, orders_fd, output_fd, reports_fd)

    @classmethod
    def take(cls, held: HeldGuardian) -> Self:
        """Go on with a guardian that an earlier program in this process has started."""
        return cls(held.pid, *held.descriptors, held.reports)

    def held(self, output: bytes) -> HeldGuardian | None:
        """Return it as another program would find it, ``output`` being what was read of a frame; None where it died."""
        identity = ProcessId.of(self.pid)
        if self._is_collected or self._orders < 0 or identity is None or not identity.is_alive:
            return None
        return HeldGuardian(
            pid=self.pid,
            started=identity.started,
            orders_fd=self._orders,
            output_fd=self._output,
            reports_fd=self._reports,
            output=output,
            reports=bytes(self._report),
        )

    def order(self, order: int) -> None:
        """Send one order; a guardian that is gone, or does not read, is left to its end."""
        if self._orders >= 0:
            try:
                os.write(self._orders, bytes([order]))
            except (BrokenPipeError, BlockingIOError):
                return

    def let_go(self) -> None:
        """Close the lifeline."""
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1

    def kill(self) -> None:
        """Send SIGKILL to the guardian, which is our child: its number is its own until we collect it."""
        if not self._collect():
            os.kill(self.pid, signal.SIGKILL)

    async def read_output(self) -> bytes:
        """Return what the engine has printed, in frames as they come; nothing at the end."""
        return await _read(self._output)

    async def read_report(self, limit_bytes: int) -> bytes:
        """Return the next line of its reports; nothing at the end, or where a line is longer than that."""
        while b"\n" not in self._report:
            data = await _read(self._reports)
            self._report += data
            if not data or len(self._report) > limit_bytes:
                return b""
        line, _, rest = bytes(self._report).partition(b"\n")
        self._report = bytearray(rest)
        return line

    async def wait(self) -> None:
        """Return when the guardian is dead and collected."""
        async with self._waiting:
            while not self._collect():
                if self._pidfd >= 0:
                    await anyio.wait_readable(self._pidfd)
                else:
                    await anyio.sleep(POLL_S)

    def close(self) -> None:
        """Close all that is ours."""
        self.let_go()
        for fd in (self._output, self._reports, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._output = self._reports = self._pidfd = -1

    def _collect(self) -> bool:
        if not self._is_collected:
            try:
                self._is_collected = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            except ChildProcessError:
                self._is_collected = True
        return self._is_collected


async def _read(fd: int) -> bytes:
    while True:
        if fd < 0:
            return b""
        await anyio.wait_readable(fd)
        try:
            return os.read(fd, READ_BYTES)
        except BlockingIOError:
            continue
        except OSError:
            return b""
