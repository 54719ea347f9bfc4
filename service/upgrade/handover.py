"""The handover from one program of the service to the next: across an exec, in an unnamed file.

The process stays the same, with its pid, its children and every descriptor that is marked to stay. So guardians see no
death of their parent, lifelines do not end, and new connections wait in the backlog of the listening socket. Any
failure from here on ends the process, and every engine with it, as always.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from service.errors import ConfigError
from workers.process.handed_over import VERSION, Handover
from workers.process.identity import ProcessId
from workers.process.orphans import children_now
from workers.process.registry import continue_run

VARIABLE: Final = "ROUNDHOUSE_HANDOVER"
# Blocked until the next program has handlers for them.
WAITING: Final = frozenset({signal.SIGHUP, signal.SIGUSR2})
# These end the next program at once until it has handlers: it may hang before that, and has no work yet.
ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class Inherited:
    """The handover that a program received, read once; its descriptors are no longer inheritable."""

    def __init__(self, handover: Handover) -> None:
        self.handover = handover
        self.children: Sequence[ProcessId] = children_now()
        for fd in handover.descriptors:
            os.set_inheritable(fd, False)
        continue_run(handover.fleet.run)

    def __repr__(self) -> str:
        return f"<Inherited from {self.handover.roundhouse} engines={len(self.handover.fleet.workers)}>"

    def listener(self) -> socket.socket:
        """Return the listening socket."""
        listener = socket.socket(fileno=self.handover.listener_fd)
        listener.setblocking(False)
        return listener


def take_handover() -> Inherited | None:
    """Take the handover from an earlier program in this process; None without one.

    Raises:
        ConfigError: it cannot be read; the process must end, and its engines with it.
    """
    descriptor = os.environ.pop(VARIABLE, None)
    if descriptor is None:
        return None
    try:
        with os.fdopen(int(descriptor), "rb") as file:
            handover = msgspec.json.decode(file.read(), type=Handover)
        if handover.version != VERSION:
            raise ConfigError(f"{VARIABLE}: its form is {handover.version}, and only {VERSION} is known here")
        return Inherited(handover)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{VARIABLE}: what was to be handed over cannot be read: {error}") from error


def let_signals_in() -> None:
    """Take the signals that came during the exec; call it once they have handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)


def replace_program(handover: Handover, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run ``argv`` in place of this program; it never returns.

    Raises:
        OSError: the exec failed; nothing has changed.
    """
    descriptors = handover.descriptors
    handlers = {number: signal.getsignal(number) for number in ENDING}
    document = os.memfd_create("roundhouse-handover")
    try:
        _write(document, msgspec.json.encode(handover))
        for fd in (document, *descriptors):
            os.set_inheritable(fd, True)
        for each in (sys.stdout, sys.stderr, *logging.getLogger().handlers):
            each.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
        for number in ENDING:  # a signal at this moment would be lost with its handler
            signal.signal(number, signal.SIG_DFL)
        os.execve(argv[0], list(argv), {**environment, VARIABLE: str(document)})  # noqa: S606 - our own command
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        let_signals_in()
        for fd in descriptors:
            os.set_inheritable(fd, False)
        os.close(document)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
