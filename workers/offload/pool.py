"""Runs slow work in another process: a thread cannot be ended, and holds up the event loop all the same.

The function and its arguments are pickled, so both are plain, and the function belongs to a module. The processes run a
program of ours (``program``) that imports only that module: the library's own pool would import the main program of our
user, which may start an engine. They have their own session, since a Ctrl-C is ours to handle.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Final, Self, TypeVar, TypeVarTuple, cast

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.lowlevel import RunVar
from anyio.streams.buffered import BufferedByteReceiveStream

from workers.errors import OffloadCrowded
from workers.offload import program

T = TypeVar("T")
Args = TypeVarTuple("Args")
AT_ONCE: Final = 2  # processes per purpose
CROWD: Final = 100  # most waiting calls of a purpose that may be refused
START_LIMIT_S: Final = 20.0  # to start a process, on a machine that is busy with everything else
TRIES: Final = 2  # the kernel may end a process when memory is short
_BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead)
QUICK_CHARS: Final = 4096  # most characters of the judged text and of its pattern that are judged in process
QUICK_S: Final = 0.01  # time of the event loop
ELSEWHERE_S: Final = 0.2  # processor time for one answer or one call, all together
JUDGE_LIMIT_S: Final = 5.0  # for the other process; the judgement's own limit is much shorter


class Purpose(Enum):
    """The queue of a call: answers of models never wait for documents that strangers post."""

    DOCUMENTS = "documents"  # refused if the queue is long
    ANSWERS = "answers"
    REWARDS = "rewards"  # callables of users, which may take long


asked_for: ContextVar[str | None] = ContextVar("offloaded for", default=None)  # the key that the call is for


async def offload(
    function: Callable[[*Args], T], *arguments: *Args, limit_s: float, purpose: Purpose = Purpose.ANSWERS
) -> T:
    """Run ``function`` in another process; return its result. The wait in the queue is not limited.

    Keys (``asked_for``) take turns in the queue.

    Raises:
        TimeoutError: it took longer than ``limit_s`` and was ended, or its processes died.
        OffloadCrowded: too many documents already wait.
    """
    request = pickle.dumps((function, arguments, limit_s))
    pool = _pool.get(None)
    if pool is not None:
        return cast("T", await pool.run(request, limit_s, purpose))
    pool = Pool()
    try:
        return cast("T", await pool.run(request, limit_s, purpose))
    finally:
        await pool.close()


async def judge(
    function: Callable[[*Args, float], T], *arguments: *Args, size: int, aside: Callable[[], None] = lambda: None
) -> T:
    """Run ``function``, whose last parameter is a limit in seconds: here if that is quick, else offloaded.

    ``size`` is the length of its longest text, in characters. ``aside`` is called before it is offloaded.

    Raises:
        TimeoutError: it takes too long in the other process as well.
    """
    if size <= QUICK_CHARS:
        with suppress(TimeoutError):  # the longer limit of another process may suffice
            return function(*arguments, QUICK_S)
    aside()
    return await offload(function, *arguments, ELSEWHERE_S, limit_s=JUDGE_LIMIT_S)


@asynccontextmanager
async def offloading() -> AsyncIterator["Pool"]:
    """Keep the processes for a block, for all of this event loop; outside it each call starts its own."""
    pool = _pool.get(None) or Pool()
    _pool.set(pool)
    pool.users += 1
    try:
        yield pool
    finally:
        pool.users -= 1
        if not pool.users:
            _pool.set(None)
            await pool.close()


class Pool:
    """The processes of one event loop: none at first, at most ``AT_ONCE`` per purpose."""

    def __init__(self) -> None:
        self.users = 0
        self._is_closed = False
        self._idle: list[_Helper] = []
        self._places = {purpose: _Places(AT_ONCE) for purpose in Purpose}

    def __repr__(self) -> str:
        return f"<Pool idle={len(self._idle)} {self._places}>"

    async def run(self, request: bytes, limit_s: float, purpose: Purpose) -> object:
        """Run a pickled call; return its result, or raise as ``offload`` does."""
        places = self._places[purpose]
        if purpose is Purpose.DOCUMENTS and places.waiting >= CROWD:
            raise OffloadCrowded(f"{CROWD} documents are waiting to be examined")
        is_exact = purpose is Purpose.REWARDS  # their limit is of real time, since a callable may wait
        async with places.take(asked_for.get()):
            for _ in range(TRIES):
                try:
                    answer = await self._ask(request, limit_s + (0.0 if is_exact else START_LIMIT_S))
                except TimeoutError:  # an OSError, but no broken pipe
                    raise
                except _BROKEN:
                    continue
                return _unpacked(answer)
            raise TimeoutError("the processes for this check have died or cannot be started")

    async def _ask(self, request: bytes, limit_s: float) -> bytes:
        helper = await self._helper()
        try:
            with anyio.fail_after(limit_s):
                answer = await helper.ask(request)
        except BaseException:
            await helper.end()
            raise
        if self._is_closed:
            await helper.end()
        else:
            self._idle.append(helper)
        return answer

    async def _helper(self) -> "_Helper":
        while self._idle:
            helper = self._idle.pop()
            if helper.is_alive:
                return helper
            await helper.end()
        return await _Helper.start()

    async def close(self) -> None:
        """End the idle processes; a busy one ends after its call."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().end()


_pool: RunVar[Pool | None] = RunVar("offload pool")


class _Places:
    """Places for calls; waiting keys take turns, and each key's calls keep their order."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str | None, deque[anyio.Event]] = {}  # the next key comes first

    def __repr__(self) -> str:
        return f"<_Places free={self._free} waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def take(self, whose: str | None) -> AsyncIterator[None]:
        """Hold a place for a block."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(whose)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, whose: str | None) -> None:
        turn = anyio.Event()
        queue = self._waiting.setdefault(whose, deque())
        queue.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # the place is ours, and unused
                self._pass_on()
            else:
                queue.remove(turn)
                if not queue:
                    del self._waiting[whose]
            raise

    def _pass_on(self) -> None:
        if not self._waiting:
            self._free += 1
            return
        whose = next(iter(self._waiting))
        queue = self._waiting.pop(whose)
        turn = queue.popleft()
        if queue:
            self._waiting[whose] = queue
        turn.set()


class _Helper:
    """One process, for one call at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._input = cast("ByteSendStream", process.stdin)
        self._output = BufferedByteReceiveStream(cast("ByteReceiveStream", process.stdout))

    @classmethod
    async def start(cls) -> Self:
        command = [sys.executable, "-P", "-u", str(Path(program.__file__))]
        process = await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        helper = cls(process)
        try:
            await helper._send(pickle.dumps(sys.path))
        except BaseException:
            await helper.end()
            raise
        return helper

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes) -> bytes:
        await self._send(request)
        size = int.from_bytes(await self._output.receive_exactly(program.HEAD), "big")
        return await self._output.receive_exactly(size)

    async def _send(self, message: bytes) -> None:
        await self._input.send(len(message).to_bytes(program.HEAD, "big") + message)

    async def end(self) -> None:
        with anyio.CancelScope(shield=True):
            if self.is_alive:  # else the number of its group may be another's by now
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that a function has started
            await self._process.aclose()


def _unpacked(answer: bytes) -> object:
    is_error, result = pickle.loads(answer)  # noqa: S301 - from a process of ours
    if is_error:
        raise result
    return result
