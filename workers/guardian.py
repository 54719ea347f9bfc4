"""The parent of one engine: it outlives Roundhouse by milliseconds and the engine's whole tree never outlives it.

Run as ``python -I -S guardian.py PROGRAM [ARGUMENT ...]`` with three pipes to Roundhouse, and nothing but the standard
library, so that it starts in milliseconds and no other code of ours can break it:

* standard input is the lifeline and takes one order: ``T`` sends SIGTERM to the engine's group. Its end means that
  Roundhouse is gone, however it went, or wants the engine no more, and kills the tree.
* standard output carries what the engine prints on both of its streams. Roundhouse may be slow or gone, the engine is
  drained all the same; what does not fit the buffer is dropped, with a line saying how much.
* standard error carries one JSON object a line: ``started``, ``failed`` (no exec), ``exited`` and last ``empty``.

How the tree is held: the guardian is a subreaper, so every descendant whose parent dies becomes its child,
double-forked and setsid'ed ones included; killing all children until there are none left ends the whole tree. The
engine is armed with PDEATHSIG for the case that the guardian itself is killed.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections import deque

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
BUFFER_BYTES = 1024 * 1024  # output held while Roundhouse is busy: seconds of the chattiest engine's log
READ_BYTES = 64 * 1024
KILL_PAUSE_MS = 2  # between two rounds of killing, for the kernel to hand us the orphans
FLUSH_LIMIT_S = 1.0  # for the last output to reach Roundhouse once the tree is gone
ORDER_TERMINATE = ord("T")
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def _report(event: str, **fields: object) -> None:
    line = json.dumps({"event": event, **fields}) + "\n"
    with contextlib.suppress(BrokenPipeError):  # Roundhouse is gone; the lifeline says so too
        os.write(2, line.encode())


def _become_engine(command: list[str], guardian_pid: int, output_fd: int, failure_fd: int) -> None:
    """Turn this freshly forked child into the engine; does not return."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian_pid:  # the guardian died before PDEATHSIG was armed
            os._exit(1)
        for ignored in (*IGNORED, signal.SIGXFSZ):  # Python itself ignores the last
            signal.signal(ignored, signal.SIG_DFL)  # ignored signals would stay ignored through exec
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prefer_for_oom()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.execvp(command[0], command)
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) and error.errno else 0
        os.write(failure_fd, json.dumps({"errno": number, "message": str(error)}).encode())
    finally:
        os._exit(127)


def _prefer_for_oom() -> None:
    # When memory runs out the kernel is to take the engine, which can be started again, and not Roundhouse.
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - between fork and exec
            file.write("500")
    except OSError:
        pass  # a container may forbid it; the engine runs all the same


class Output:
    """Carries the engine's output to Roundhouse without ever making the engine wait."""

    def __init__(self, source_fd: int) -> None:
        self.source_fd = source_fd
        self.is_open = True
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._dropped_bytes = 0
        os.set_blocking(source_fd, False)
        os.set_blocking(1, False)

    @property
    def wants_to_write(self) -> bool:
        """Whether output is held that Roundhouse has not taken."""
        return bool(self._held)

    def take(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = os.read(self.source_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        self._held.append(data)
        self._held_bytes += len(data)
        while self._held_bytes > BUFFER_BYTES:
            lost = len(self._held.popleft())
            self._held_bytes -= lost
            self._dropped_bytes += lost
        return True

    def give(self) -> bool:
        """Write once; return whether there may be more."""
        if self._dropped_bytes:
            note = f"\n[roundhouse: {self._dropped_bytes} bytes of output dropped here]\n".encode()
            self._dropped_bytes = 0
            self._held.appendleft(note)
            self._held_bytes += len(note)
        if not self._held:
            return False
        try:
            written = os.write(1, self._held[0])
        except BlockingIOError:
            return False
        except OSError:  # Roundhouse is gone
            self._held.clear()
            self._held_bytes = 0
            return False
        self._held_bytes -= written
        rest = self._held.popleft()[written:]
        if rest:
            self._held.appendleft(rest)
        return bool(self._held)

    def finish(self) -> None:
        """Pass on what is left, for a bounded time."""
        while self.is_open and self.take():
            pass
        deadline = time.monotonic() + FLUSH_LIMIT_S
        poller = select.poll()
        poller.register(1, select.POLLOUT)
        while self.wants_to_write and time.monotonic() < deadline:
            poller.poll(50)
            self.give()


class Guardian:
    """Waits for orders, output and deaths, and keeps the one promise."""

    def __init__(self, engine_pid: int, output: Output, wakeup_fd: int) -> None:
        self._engine_pid = engine_pid
        self._engine_lives = True
        self._output = output
        self._wakeup_fd = wakeup_fd

    def watch(self) -> None:
        """Return when the engine has exited or is no longer wanted."""
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(self._wakeup_fd, select.POLLIN)
        poller.register(self._output.source_fd, select.POLLIN)
        watching_output = True
        writing = False
        while self._engine_lives:
            if writing != self._output.wants_to_write:
                writing = not writing
                if writing:
                    poller.register(1, select.POLLOUT)
                else:
                    poller.unregister(1)
            ready = dict(poller.poll())
            if self._wakeup_fd in ready:
                os.read(self._wakeup_fd, READ_BYTES)
                self._reap()
            if 0 in ready and not self._obey():
                return
            if self._output.source_fd in ready:
                self._output.take()
                if watching_output and not self._output.is_open:
                    watching_output = False
                    poller.unregister(self._output.source_fd)
            if 1 in ready:
                self._output.give()

    def end_tree(self) -> None:
        """Kill until no descendant is left."""
        poller = select.poll()
        poller.register(self._wakeup_fd, select.POLLIN)
        while True:
            for pid in _children():
                with contextlib.suppress(PermissionError):  # it has changed its user; its parent's death is left
                    os.kill(pid, signal.SIGKILL)  # our own unreaped child: the number cannot have been given again
            if not self._reap():
                return
            if poller.poll(KILL_PAUSE_MS):
                os.read(self._wakeup_fd, READ_BYTES)

    def _obey(self) -> bool:
        """Take what has come on the lifeline; return whether the engine is still wanted."""
        orders = os.read(0, READ_BYTES)
        if not orders:
            return False
        if ORDER_TERMINATE in orders and self._engine_lives:
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
                os.killpg(self._engine_pid, signal.SIGTERM)
        return True

    def _reap(self) -> bool:
        """Collect the dead; return whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._engine_pid:
                self._engine_lives = False
                _report("exited", status=os.waitstatus_to_exitcode(status))


def _children() -> list[int]:
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:  # noqa: PTH123
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [child for child in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _parent_of(child) == pid]


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _wake_on_child_death() -> int:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return read_fd


def main(command: list[str]) -> None:
    """Start ``command`` and guard it."""
    # Roundhouse's event loop leaves copies of our pipes, and whatever else is inheritable, open in us. An engine that
    # held them on would keep Roundhouse from seeing our end.
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    guardian_pid = os.getpid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)  # only Roundhouse decides; a Ctrl-C in its terminal must not come past it
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup_fd = _wake_on_child_death()
    output_read, output_write = os.pipe()
    failure_read, failure_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_engine(command, guardian_pid, output_write, failure_write)
    os.close(output_write)
    os.close(failure_write)
    failure = os.read(failure_read, READ_BYTES)  # ends at once: exec closes it, or the failed child does
    if failure:
        _report("failed", **json.loads(failure))
    else:
        _report("started", pid=pid)
    output = Output(output_read)
    guardian = Guardian(pid, output, wakeup_fd)
    guardian.watch()
    guardian.end_tree()
    _report("empty")
    output.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
