"""A child of ours on three pipes, held by bare descriptors, so that another program in this process can go on with it.

A stream of the event loop would read ahead into buffers that cannot be handed over, and own the process.
"""

import fcntl
import os
import signal
from collections.abc import Mapping
from typing import Final, Self

import anyio

from workers.process.identity import ProcessId

READ_BYTES: Final = 64 * 1024
FIRST_FD: Final = 3  # a child's ends must not be the numbers they are copied to
POLL_S: Final = 0.02  # for the end of a child if the kernel has no pidfds


class PipedChild:
    """One process and our ends of its standard streams; used in the event loop, closed once."""

    def __init__(self, pid: int, stdin_fd: int, stdout_fd: int, stderr_fd: int) -> None:
        self.pid = pid
        self._fds = stdin_fd, stdout_fd, stderr_fd
        self._is_collected = False
        self._waiting = anyio.Lock()
        for fd in self._fds:
            os.set_blocking(fd, False)
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # a kernel or a sandbox without pidfds, or the child is already collected
            self._pidfd = -1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pid} collected={self._is_collected}>"

    @classmethod
    def start(cls, argv: list[str], env: Mapping[str, str]) -> Self:
        """Start a child in a session of its own, on three new pipes.

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
            # From our main thread, like all of the event loop: the signal of a parent's death is tied to the thread.
            pid = os.posix_spawn(argv[0], argv, env, file_actions=streams, setsid=True)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return cls(pid, *ours)

    @property
    def fds(self) -> tuple[int, int, int]:
        """Our ends of its standard input, output and error; -1 if one is closed."""
        return self._fds

    def identity(self) -> ProcessId | None:
        """Return its identity; None if it has died, or must end because its standard input is closed."""
        identity = ProcessId.of(self.pid)
        if self._is_collected or self._fds[0] < 0 or identity is None or not identity.is_alive:
            return None
        return identity

    def let_go(self) -> None:
        """Close its standard input."""
        if self._fds[0] >= 0:
            os.close(self._fds[0])
            self._fds = -1, *self._fds[1:]

    def signal_group(self, number: int) -> None:
        """Send a signal to the group that it leads, unless it is collected: until then the number is its own."""
        if not self._collect():
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the child, whose number is its own until we collect it."""
        if not self._collect():
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Return when the child is dead and collected."""
        async with self._waiting:
            while not self._collect():
                if self._pidfd >= 0:
                    await anyio.wait_readable(self._pidfd)
                else:
                    await anyio.sleep(POLL_S)

    def close(self) -> None:
        """Close all our descriptors."""
        self.let_go()
        for fd in (*self._fds[1:], self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._fds = -1, -1, -1
        self._pidfd = -1

    def _collect(self) -> bool:
        if not self._is_collected:
            try:
                self._is_collected = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            except ChildProcessError:
                self._is_collected = True
        return self._is_collected


async def read_some(fd: int) -> bytes:
    """Read the next bytes of a non-blocking descriptor; empty at the end."""
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
