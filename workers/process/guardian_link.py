"""Our side of one guardian: its process, the lifeline, and the pipes of its output and its reports.

Made of bare descriptors, so that another program in this same process can go on with them: ``held`` tells what they
are and what has been read of them in part, ``take`` goes on from there.
"""

import os
from typing import Self

from msgspec import Struct

from workers.process.piped_child import PipedChild, read_some


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


class GuardianLink(PipedChild):
    """A guardian: its standard input is the lifeline, the others carry output and reports."""

    def __init__(self, pid: int, orders_fd: int, output_fd: int, reports_fd: int, reports: bytes = b"") -> None:
        super().__init__(pid, orders_fd, output_fd, reports_fd)
        self._report = bytearray(reports)

    @classmethod
    def take(cls, held: HeldGuardian) -> Self:
        """Go on with a guardian that an earlier program in this process has started."""
        return cls(held.pid, *held.descriptors, held.reports)

    def held(self, output: bytes) -> HeldGuardian | None:
        """Return it as another program would find it, ``output`` being what was read of a frame; None where it died."""
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
        """Send one order; a guardian that is gone, or does not read, is left to its end."""
        if self.fds[0] >= 0:
            try:
                os.write(self.fds[0], bytes([order]))
            except (BrokenPipeError, BlockingIOError):
                return

    async def read_output(self) -> bytes:
        """Return what the engine has printed, in frames as they come; nothing at the end."""
        return await read_some(self.fds[1])

    async def read_report(self, limit_bytes: int) -> bytes:
        """Return the next line of its reports; nothing at the end, or where a line is longer than that."""
        while b"\n" not in self._report:
            data = await read_some(self.fds[2])
            self._report += data
            if not data or len(self._report) > limit_bytes:
                return b""
        line, _, rest = bytes(self._report).partition(b"\n")
        self._report = bytearray(rest)
        return line
