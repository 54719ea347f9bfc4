"""The parent of one engine: it outlives Roundhouse by milliseconds and the engine's whole tree never outlives it.

Run as ``python -I -S guardian.py --guard PARENT PROGRAM [ARGUMENT ...]`` with three pipes to Roundhouse (process
PARENT). It uses only the standard library, so that it starts in milliseconds and no other code can break it:

* standard input is the lifeline and takes orders: ``T`` sends SIGTERM to the engine's group, ``K`` kills the tree. So
  does its end, which means that Roundhouse is gone, and so does the death of PARENT: a process that PARENT has forked
  may hold the pipe open. ``L`` says to the member of a span that Roundhouse lives and its lease is valid, ``S`` that it
  only lives.
* standard output carries the engine's output in frames: a byte for the stream (1 or 2), four for the length, big end
  first, then that many bytes. Even if Roundhouse is slow or gone the engine is drained; output beyond the buffer is
  dropped, with a line saying how much.
* standard error carries one JSON object per line: ``started``, ``failed`` (no exec), ``exited`` and last ``empty``.

The guardian holds the tree as a subreaper: every descendant whose parent dies becomes its child, double-forked and
setsid'ed ones included. Killing all children until none is left ends the whole tree. The engine is armed with PDEATHSIG
in case the guardian itself is killed. The guardians of a span hold connections to each other (``lifelines.py``).

``guardian.py --tether PARENT PROGRAM [ARGUMENT ...]`` holds a program that talks to Roundhouse over its own standard
streams (an MCP server) in the same way: the streams are the program's, the death of PARENT or a SIGTERM ends the tree,
and the exit status is passed on.

Every process below a guardian carries the mark of the run in its environment, and the guardian itself does not: a child
of Roundhouse with the mark has lost its guardian.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from workers.process.engine_output import Output
    from workers.process.lifelines import Lifelines
else:  # a program by itself
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120 - milliseconds count
    from engine_output import Output

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 64 * 1024
GUARD = "--guard"
TETHER = "--tether"
MARK = "ROUNDHOUSE_RUN"  # in the environment of every process below a guardian
MARK_TO_BE = "ROUNDHOUSE_RUN_BELOW"  # the same in the guardian's own environment, set by Roundhouse
SPAN = "ROUNDHOUSE_SPAN_BELOW"  # the member's place in a span (JSON), set by Roundhouse in the same way
FOLDER = "ROUNDHOUSE_FOLDER_BELOW"  # the engine's working directory, set by Roundhouse in the guardian's environment
KILL_PAUSE_MS = 2  # between two rounds of killing, for the kernel to hand us the orphans
ORDER_TERMINATE = ord("T")
ORDER_KILL = ord("K")
ORDER_LEASE = ord("L")
ORDER_SERVICE = ord("S")
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def become_subreaper() -> None:
    """Let every descendant whose parent dies become a child of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _pass_mark_on() -> None:
    # /proc/PID/environ shows the environment at a process's start, so this marks our children and not us.
    mark = os.environ.pop(MARK_TO_BE, None)
    if mark is not None:
        os.environ[MARK] = mark
        os.environ["SPT_NOENV"] = "1"  # setproctitle (vLLM) would overwrite the environment, and the mark with it


def _report(event: str, **fields: object) -> None:
    line = json.dumps({"event": event, **fields}) + "\n"
    with contextlib.suppress(BrokenPipeError):  # Roundhouse is gone; the end of the lifeline shows that too
        os.write(2, line.encode())


def _become_tethered(command: list[str], guardian_pid: int) -> None:
    """Turn this freshly forked child into the program, on the streams that we were given; does not return."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian_pid:
            os._exit(1)
        for number in (*IGNORED, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _become_engine(command: list[str], guardian_pid: int, output_fds: tuple[int, int], failure_fd: int) -> None:
    """Turn this freshly forked child into the engine; does not return."""
    try:
        folder = os.environ.pop(FOLDER, None)
        if folder is not None:
            os.chdir(folder)
            os.environ["PWD"] = folder
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian_pid:  # the guardian died before PDEATHSIG was armed
            os._exit(1)
        for ignored in (*IGNORED, signal.SIGXFSZ):  # Python itself ignores the last
            signal.signal(ignored, signal.SIG_DFL)  # ignored signals would stay ignored through exec
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prefer_for_oom()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output_fds[0], 1)
        os.dup2(output_fds[1], 2)
        os.execvp(command[0], command)
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) and error.errno else 0
        os.write(failure_fd, json.dumps({"errno": number, "message": str(error)}).encode())
    finally:
        os._exit(127)


def _prefer_for_oom() -> None:
    # When memory runs out the kernel should take the engine, which can be restarted, and not Roundhouse.
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - between fork and exec
            file.write("500")
    except OSError:
        pass  # a container may forbid it; the engine runs all the same


class Guardian:
    """Waits for orders, output and deaths, and ends the tree."""

    def __init__(self, engine_pid: int, wakeup_fd: int, lifelines: "Lifelines | None" = None) -> None:
        self._engine_pid = engine_pid
        self._lifelines = lifelines
        self._engine_lives = True
        self.is_stopped = False  # on an order of Roundhouse
        self.status: int | None = None
        self.max_rss_bytes = 0
        self.cpu_s = 0.0
        self._wakeup_fd = wakeup_fd

    def watch_tethered(self) -> None:
        """Return when the program has exited or must end."""
        poller = select.poll()
        poller.register(self._wakeup_fd, select.POLLIN)
        self._reap()  # a death before the handler was set has not woken us
        while self._engine_lives:
            poller.poll()
            if signal.SIGTERM in os.read(self._wakeup_fd, READ_BYTES):
                return
            self._reap()

    def watch(self, output: Output, parent_fd: int) -> None:
        """Return when the engine has exited or is no longer wanted."""
        poller = select.poll()
        watched = set(output.open_fds)
        ends = [parent_fd] if parent_fd >= 0 else []
        ends += [self._lifelines.end_fd] if self._lifelines is not None else []
        for fd in (0, self._wakeup_fd, *watched, *ends):
            poller.register(fd, select.POLLIN)
        writing = False
        while self._engine_lives:
            if writing != output.wants_to_write:
                writing = not writing
                if writing:
                    poller.register(1, select.POLLOUT)
                else:
                    poller.unregister(1)
            ready = dict(poller.poll())
            if self._wakeup_fd in ready:
                os.read(self._wakeup_fd, READ_BYTES)
                self._reap()
            if not ready.keys().isdisjoint(ends) or (0 in ready and not self._obey()):
                return
            for fd in watched & ready.keys():
                output.read_once(fd)
            for fd in watched - output.open_fds.keys():
                watched.discard(fd)
                poller.unregister(fd)
            if 1 in ready:
                output.give()

    def end_tree(self) -> None:
        """Kill until no descendant is left."""
        poller = select.poll()
        poller.register(self._wakeup_fd, select.POLLIN)
        while True:
            for pid in _children():
                with contextlib.suppress(PermissionError):  # it has changed its user; only its parent's death ends it
                    os.kill(pid, signal.SIGKILL)  # our own unreaped child: the number cannot have been reused
            if not self._reap():
                return
            if poller.poll(KILL_PAUSE_MS):
                os.read(self._wakeup_fd, READ_BYTES)

    def _obey(self) -> bool:
        """Read the lifeline's orders; return whether the engine is still wanted."""
        orders = os.read(0, READ_BYTES)
        self.is_stopped |= ORDER_KILL in orders or ORDER_TERMINATE in orders
        if not orders or ORDER_KILL in orders:
            return False
        if self._lifelines is not None and (ORDER_LEASE in orders or ORDER_SERVICE in orders):
            self._lifelines.renew(has_lease=ORDER_LEASE in orders)
        if ORDER_TERMINATE in orders and self._engine_lives:
            with contextlib.suppress(ProcessLookupError):  # the whole group is already gone
                os.killpg(self._engine_pid, signal.SIGTERM)
        return True

    def _reap(self) -> bool:
        """Collect the dead; return whether any child is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._engine_pid:
                self._engine_lives = False
                self.status = os.waitstatus_to_exitcode(status)
                self.max_rss_bytes = usage.ru_maxrss * 1024
                self.cpu_s = round(usage.ru_utime + usage.ru_stime, 3)


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


def guard(parent_pid: int, command: list[str]) -> None:
    """Start ``command`` as an engine and guard it."""
    # Roundhouse's event loop leaves copies of our pipes, and other inheritable descriptors, open in us. An engine that
    # kept them would hide our end from Roundhouse.
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    try:
        parent_fd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel or a sandbox without pidfds: only the lifeline's end can show it
        parent_fd = -1
    if os.getppid() != parent_pid:
        return
    try:
        lifelines = _lifelines()
    except OSError as error:
        _report("failed", errno=error.errno, message=f"the lifelines of its span: {error}")
        return
    guardian_pid = os.getpid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)  # only Roundhouse decides; a Ctrl-C in its terminal must not bypass it
    become_subreaper()
    wakeup_fd = _wake_on_child_death()
    pipes = os.pipe(), os.pipe()
    failure_read, failure_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_engine(command, guardian_pid, (pipes[0][1], pipes[1][1]), failure_write)
    for written in (pipes[0][1], pipes[1][1], failure_write):
        os.close(written)
    failure = os.read(failure_read, READ_BYTES)  # ends at once: exec closes it, or the failed child does
    if failure:
        _report("failed", **json.loads(failure))
    else:
        _report("started", pid=pid)
    output = Output((pipes[0][0], pipes[1][0]))
    guardian = Guardian(pid, wakeup_fd, lifelines)
    if lifelines is not None:
        lifelines.start(pid)
    guardian.watch(output, parent_fd)
    parted = {} if lifelines is None else lifelines.part(guardian.status, is_stopped=guardian.is_stopped)
    guardian.end_tree()
    _report("exited", status=guardian.status, max_rss_bytes=guardian.max_rss_bytes, cpu_s=guardian.cpu_s, **parted)
    _report("empty")
    output.drain()


def _lifelines() -> "Lifelines | None":
    """Return the lifelines of a span's member; None for an engine on its own."""
    plan = os.environ.pop(SPAN, None)
    if plan is None:
        return None
    lifelines: Lifelines = importlib.import_module("lifelines").Lifelines(json.loads(plan), _report)
    return lifelines


def tether(parent_pid: int, command: list[str]) -> int:
    """Start ``command`` on our own streams and hold its tree; return its exit status as a shell would."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    wakeup_fd = _wake_on_child_death()
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)  # comes through the wakeup descriptor
    become_subreaper()
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    own_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_tethered(command, own_pid)
    for fd in (0, 1):  # only the program holds its streams, so that their ends are seen
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    guardian = Guardian(pid, wakeup_fd)
    if os.getppid() == parent_pid:  # else it died before PDEATHSIG was armed
        guardian.watch_tethered()
    guardian.end_tree()
    status = guardian.status or 0
    return status if status >= 0 else 128 - status


def main(arguments: list[str]) -> None:
    """Hold an engine, or a program on a tether."""
    _pass_mark_on()
    role, parent_pid, *command = arguments
    if role == TETHER:
        sys.exit(tether(int(parent_pid), command))
    guard(int(parent_pid), command)


if __name__ == "__main__":
    main(sys.argv[1:])
