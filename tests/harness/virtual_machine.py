"""A machine whose processes are scripted engines on the virtual loop, each under a guardian that reports like ours."""

import asyncio
import json
import signal
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Self

from tests.harness.programs.engine import Engine, parse_options
from tests.harness.virtual_loop import VirtualLoop
from workers.health.probes import KernelView, ProcessView
from workers.process import guardian

FIRST_PID = 5_000_000  # above any of a real kernel, so that a signal to one hits no process
DYING_S = 0.02  # at most, from its end to the guardian's report


class Machine:
    """Its processes; ``make`` gives the engine of a command line."""

    def __init__(self, loop: VirtualLoop, chance: Random, make: "Callable[[EngineProcess, Namespace], Engine]") -> None:
        self.loop = loop
        self.chance = chance
        self.make = make
        self.processes: list[EngineProcess] = []
        self._next_pid = FIRST_PID

    @property
    def running(self) -> "list[EngineProcess]":
        """The processes that have not ended."""
        return [process for process in self.processes if not process.is_over]

    def spawn(self, argv: Sequence[str]) -> "EngineProcess":
        self._next_pid += 2
        process = EngineProcess(self, self._next_pid, parse_options(list(argv)))
        self.processes.append(process)
        return process

    def look_at_tree(self, root: int) -> KernelView:
        """Return the kernel's view of the processes below a guardian."""
        return KernelView(processes=tuple(each.view() for each in self.running if each.guardian_pid == root))

    def port_fault(self, _host: str, port: int) -> OSError | None:
        return OSError(98, "in use") if port in self.loop.network.servers else None

    def guardian_type(self) -> "type[ScriptedGuardian]":
        """Return the guardians of this machine."""
        return type("GuardianOfMachine", (ScriptedGuardian,), {"machine": self})


class EngineProcess:
    """One engine, from its start to its end."""

    def __init__(self, machine: Machine, pid: int, options: Namespace) -> None:
        self.pid, self.guardian_pid = pid, pid + 1
        self.is_over = False
        self.reports: asyncio.Queue[bytes] = asyncio.Queue()
        self.gone = asyncio.Event()
        self._machine = machine
        self._began_at = machine.loop.time()
        self._port = options.port
        self._report(event="started", pid=pid)
        self.engine = machine.make(self, options)
        self.held = machine.loop.network.listen(options.port, self.engine.serve)
        if options.breaks and options.breaks[0] == "age":
            machine.loop.call_later(options.breaks[1], self.end, 1)

    def view(self) -> ProcessView:
        """Return the kernel's view: one that computes has used the processor since its start."""
        ran_s = 0.0 if self.engine.is_wedged else self._machine.loop.time() - self._began_at
        return ProcessView(
            pid=self.pid, name="engine", state="sleeping", wchan=None, rss_bytes=1, cpu_s=round(ran_s, 2), threads=1
        )

    def _report(self, **report: object) -> None:
        self.reports.put_nowait(json.dumps(report).encode())

    def terminate(self) -> None:
        """Handle SIGTERM: some engines end soon, some never."""
        if self._machine.chance.random() < 0.8:
            self._machine.loop.call_later(self._machine.chance.uniform(0, 2), self.end, 0)

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def end(self, status: int) -> None:
        """End with the status that a parent sees: an exit status, or a negative signal number."""
        if self.is_over:
            return
        self.is_over = True
        loop = self._machine.loop
        if loop.network.servers.get(self._port, (None, None))[1] is self.held:
            del loop.network.servers[self._port]
        for each in list(self.held):
            each.cancel() if isinstance(each, asyncio.Task) else each.reset()
        loop.call_later(self._machine.chance.uniform(0, DYING_S), self._tell_end, status)

    def _tell_end(self, status: int) -> None:
        self._report(event="exited", status=status, max_rss_bytes=1, cpu_s=1.0)
        self._report(event="empty")
        self.reports.put_nowait(b"")
        self.gone.set()


class ScriptedEngine(Engine):
    """The scripted engine as a process of a virtual machine."""

    def __init__(self, process: EngineProcess, options: Namespace) -> None:
        super().__init__(options)
        self.process = process

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.process.held[task] = None
        try:
            await super()._answer(path, body, writer)
        finally:
            self.process.held.pop(task, None)

    def exit(self, status: int) -> None:
        self.process.end(status)
        raise asyncio.CancelledError

    def take_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGSTOP:
            self.is_wedged = True
            return
        self.process.end(-number)
        raise asyncio.CancelledError


class ScriptedGuardian:
    """A ``workers.process.child.GuardianLink`` to a guardian of a virtual machine."""

    machine: Machine

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self.pid = process.guardian_pid

    @classmethod
    def start(cls, argv: Sequence[str], _env: Mapping[str, str]) -> Self:
        command = argv[argv.index(guardian.GUARD) + 2 :]
        return cls(cls.machine.spawn(command))

    def order(self, order: int) -> None:
        if order == guardian.ORDER_TERMINATE:
            self._process.terminate()
        elif order == guardian.ORDER_KILL:
            self._process.kill()

    def let_go(self) -> None:
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> None:
        await self._process.gone.wait()

    async def read_output(self) -> bytes:
        await self._process.gone.wait()
        return b""

    async def read_report(self, _limit_bytes: int) -> bytes:
        return await self._process.reports.get()

    def hand_over_link(self, _output: bytes) -> Any:  # noqa: ANN401
        return None

    def close(self) -> None:
        """Close nothing."""
