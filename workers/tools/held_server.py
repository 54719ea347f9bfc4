"""An MCP server over stdio as one program of this process leaves it to the next, which goes on with its session."""

import os

from msgspec import Struct

from workers.process.identity import ProcessId


class HeldTool(Struct, frozen=True, kw_only=True):
    """A tool as its server listed it; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, object]


class HeldLink(Struct, frozen=True, kw_only=True):
    """Its tether's process, and our ends of its streams, which stay open over an exec.

    ``unsent`` is what of our messages its pipe has not taken, ``received`` what of its messages nobody has been given,
    ``said`` the beginning of a line on its standard error. ``last_id`` is the highest of our requests: no later one
    may bear a number up to it, and no answer to one up to it is anybody's any more.
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
        """What has to stay open."""
        return self.stdin_fd, self.stdout_fd, self.stderr_fd

    @property
    def identity(self) -> ProcessId:
        """The process of the tether."""
        return ProcessId(pid=self.pid, started=self.started)


class HeldServer(Struct, frozen=True, kw_only=True):
    """One server: ``launch`` is a digest of what it was started as, ``name`` and ``model`` who configured it.

    ``negotiated`` is the server's answer to ``initialize`` as JSON, or to ``server/discover`` where ``is_discovered``.
    """

    model: str
    name: str
    launch: str
    link: HeldLink
    negotiated: str
    is_discovered: bool
    tools: list[HeldTool]

    def fault(self, launch: str) -> str | None:
        """Return why the next program, which would start it as ``launch``, cannot go on with it; None where it can."""
        if launch != self.launch:
            return "it is to be started otherwise"
        return None if self.link.identity.is_alive else "it has died"

    def let_go(self) -> None:
        """Close what was held of it; its process is ended as any that is left over."""
        for fd in self.link.descriptors:
            os.close(fd)
