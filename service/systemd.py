"""Reports to the service manager: ready, reloading, stopping, and that the event loop turns.

The protocol is systemd's sd_notify: datagrams of ``NAME=VALUE`` lines to the socket in ``NOTIFY_SOCKET``. Without that
variable nothing is sent. The variables stay in the environment, since a program that takes over this process by
``execve`` needs them; engines are started without them.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

import contextlib
import faulthandler
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Final, Self

import anyio

FEEDS_A_PERIOD: Final = 3  # two may be late before the watchdog acts
logger = logging.getLogger(__name__)


class ServiceManager:
    """The manager that started this process; without an address nothing is sent.

    ``address`` is its socket's, ``watchdog_s`` how long it waits for a sign of life; None is for ever.
    """

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        self._address = address
        self.watchdog_s = watchdog_s

    def __repr__(self) -> str:
        """Return its address and how long it waits."""
        return f"<ServiceManager at {self._address} watchdog_s={self.watchdog_s}>"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Return the manager that ``environment`` names; a watchdog for another process does not count."""
        address = environment.get("NOTIFY_SOCKET") or None
        is_ours = environment.get("WATCHDOG_PID") in {None, "", str(os.getpid())}
        period = environment.get("WATCHDOG_USEC", "")
        watched = address is not None and is_ours and period.isascii() and period.isdigit() and int(period) > 0
        return cls(address, int(period) / 1_000_000 if watched else None)

    def tell_ready(self, status: str) -> None:
        """Report that the service serves, or serves again; ``status`` is one line for people."""
        self._tell("READY=1", f"STATUS={status}")

    def tell_stopping(self, status: str) -> None:
        """Report that the service has begun to stop."""
        self._tell("STOPPING=1", f"STATUS={status}")

    @contextlib.contextmanager
    def reloading(self, status: str) -> Iterator[None]:
        """Report a reload for a block; however it ends, report that the service serves again."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")
        try:
            yield
        finally:
            self.tell_ready(status)

    async def feed_watchdog(self) -> None:
        """Feed the watchdog while this event loop turns; return if there is none.

        If the loop hangs, the manager sends SIGABRT, which writes the stacks of all threads to standard error; the
        guardians end the engines.
        """
        if self.watchdog_s is None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may not be a file
            faulthandler.enable()
        while True:
            self._tell("WATCHDOG=1")
            await anyio.sleep(self.watchdog_s / FEEDS_A_PERIOD)

    def _tell(self, *lines: str) -> None:
        if self._address is None:
            return
        # A name that begins with @ is in the abstract namespace.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)  # a manager that does not read must not hold the event loop
                sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            logger.warning("cannot tell the service manager %s: %s", lines[0], error)
