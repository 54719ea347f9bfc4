"""The interface to tool runners of every kind, and the runner of Python callables."""

import contextlib
import contextvars
import inspect
import logging
import threading
from asyncio import Future, get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

import anyio
import msgspec
from msgspec.structs import replace

from workers.errors import UnknownTool
from workers.notifier import Notifier
from workers.tools.definition import ToolOrigin
from workers.tools.results import MAX_RESULT_BYTES, MAX_RESULT_VALUES, ResultTooLarge, is_bounded

MAX_THREADS: Final = 64
MAX_OF_ONE: Final = 16
CROWD_LOG_S: Final = 60.0
KEY_PARAMETER: Final = "idempotency_key"
Callables = Mapping[str, Callable[..., object]]
logger = logging.getLogger(__name__)


class ToolThreads:
    """Runs functions beside the event loop."""

    def __init__(self, limit: int = MAX_THREADS, limit_of_one: int = MAX_OF_ONE) -> None:
        self._limiter = anyio.CapacityLimiter(limit)
        self._limit_of_one = limit_of_one
        self._of_tool: dict[str, anyio.CapacityLimiter] = {}
        self._crowd_logged_at = float("-inf")

    def __repr__(self) -> str:
        return f"<ToolThreads {self._limiter.borrowed_tokens}/{self._limiter.total_tokens:g}>"

    async def run(self, name: str, function: Callable[[], object]) -> object:
        """Run a function in a thread; return its result. If its caller goes away, it goes on and its result is lost.

        Raises:
            BaseException: whatever the function raises.
        """
        borrower = object()
        own = self._of_tool.setdefault(name, anyio.CapacityLimiter(self._limit_of_one))
        self._tell_crowd(name, own)
        await own.acquire_on_behalf_of(borrower)
        try:
            await self._limiter.acquire_on_behalf_of(borrower)
        except BaseException:
            own.release_on_behalf_of(borrower)
            raise
        loop = get_running_loop()
        result: Future[object] = loop.create_future()
        in_context = contextvars.copy_context().run

        def work() -> None:
            try:
                value, error = in_context(function), None
            except BaseException as raised:  # noqa: BLE001 - it is raised to the waiting caller
                value, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
                loop.call_soon_threadsafe(deliver, value, error)

        def deliver(value: object, error: BaseException | None) -> None:
            self._limiter.release_on_behalf_of(borrower)
            own.release_on_behalf_of(borrower)
            if result.done():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(_deliverable(error))

        try:
            threading.Thread(target=work, name=f"tool {name}", daemon=True).start()
        except RuntimeError:
            self._limiter.release_on_behalf_of(borrower)
            own.release_on_behalf_of(borrower)
            raise
        return await result

    def _tell_crowd(self, name: str, own: anyio.CapacityLimiter) -> None:
        """Log that a call must wait for a thread: hanging functions never free theirs."""
        full = own if not own.available_tokens else self._limiter
        if full.available_tokens or anyio.current_time() - self._crowd_logged_at < CROWD_LOG_S:
            return
        self._crowd_logged_at = anyio.current_time()
        whose = f"of the tool {name}" if full is own else "of Python tools"
        logger.error("all %g threads %s are taken; calls wait, and fail by tools.timeout_s", full.total_tokens, whose)


def _deliverable(error: BaseException) -> BaseException:
    if isinstance(error, StopIteration):  # no future accepts one
        raised = RuntimeError(f"StopIteration: {error}")
        raised.__cause__ = error
        return raised
    return error


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """One call to run; ``arguments`` fit the tool's schema. ``job_name`` is the caller's, to correlate.

    ``key`` is the same when the same call is made again after a crash: a tool that keeps it acts once. ``origin`` is
    the tool's server, None if none is given.
    """

    call_id: str
    name: str
    arguments: Mapping[str, object]
    job_name: str
    key: str | None = None
    origin: ToolOrigin | None = None


class ToolRunner(Protocol):
    """Runs one call at a time, several at the same time; it may be cancelled at any moment."""

    def knows(self, name: str) -> bool | None:
        """Return whether this runner has a tool of that name; None if only a call can show it."""

    async def run(self, use: ToolUse) -> object:
        """Return the result as any JSON value; a disappointing outcome is a result like any other.

        Raises:
            UnknownTool: there is no tool of that name.
            Exception: the tool could not be run, which ends the request (specification, "Tool failures").
        """


class PythonTools:
    """Runs callables of this process: coroutine functions in the event loop, all others in a thread.

    A parameter ``idempotency_key`` gets the call's key.
    """

    def __init__(self, callables: Callables) -> None:
        self._callables = dict(callables)
        self._keyed = {name for name, function in self._callables.items() if _takes_key(function)}
        self._threads = ToolThreads()

    def __repr__(self) -> str:
        return f"<PythonTools {sorted(self._callables)}>"

    @property
    def callables(self) -> Callables:
        """The callables by the names of tools."""
        return self._callables

    def knows(self, name: str) -> bool:
        """Whether there is a callable of that name."""
        return name in self._callables

    async def run(self, use: ToolUse) -> object:
        """Call it with the arguments as keywords."""
        function = self._callables.get(use.name)
        if function is None:
            raise UnknownTool(use.name)
        arguments = {**use.arguments, KEY_PARAMETER: use.key} if use.name in self._keyed else use.arguments
        if inspect.iscoroutinefunction(function):
            awaited: Awaitable[object] = function(**arguments)
            return await awaited
        result = await self._threads.run(use.name, lambda: _call(function, arguments))
        return await result if inspect.isawaitable(result) else result


def _call(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Return a function's result; one that is too large is freed here, outside the event loop."""
    result = function(**arguments)
    if inspect.isawaitable(result) or is_bounded(result):
        return result
    del result  # the traceback would keep it
    raise ResultTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes or {MAX_RESULT_VALUES} values")


def _takes_key(function: Callable[..., object]) -> bool:
    try:
        return KEY_PARAMETER in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


class ToolRunners:
    """Several runners as one: a tool's own server, else the first that has it, else the first that may have it.

    ``servers`` are the runners that are MCP servers, by name.
    """

    def __init__(self, runners: Sequence[ToolRunner], servers: Mapping[str, ToolRunner] | None = None) -> None:
        self._runners = tuple(runners)
        self._servers = dict(servers or {})

    def __repr__(self) -> str:
        return f"<ToolRunners {list(self._runners)}>"

    def knows(self, name: str) -> bool | None:
        """Whether any of them knows it."""
        answers = [runner.knows(name) for runner in self._runners]
        return True if True in answers else None if None in answers else False

    async def run(self, use: ToolUse) -> object:
        """Run a tool by the runner that knows it."""
        if use.origin is not None:
            if use.origin.server not in self._servers:
                raise UnknownTool(f"{use.name}: there is no MCP server {use.origin.server!r} any more")
            return await self._servers[use.origin.server].run(replace(use, name=use.origin.tool))
        knowing = [runner for runner in self._runners if runner.knows(use.name)]
        if knowing:
            return await knowing[0].run(use)
        for runner in self._runners:
            if runner.knows(use.name) is None:
                with contextlib.suppress(UnknownTool):
                    return await runner.run(use)
        raise UnknownTool(use.name)


class SwitchedTools:
    """The runners of one model, which may be replaced at any moment: a call stays with the runners it began with.

    ``current`` None has no tools.
    """

    def __init__(self, current: ToolRunners | None = None) -> None:
        self._current = current
        self._calls: Counter[ToolRunners] = Counter()
        self._ended = Notifier()

    def __repr__(self) -> str:
        return f"<SwitchedTools {self._current!r}>"

    @property
    def current(self) -> ToolRunners | None:
        """The runner of calls that begin now."""
        return self._current

    def switch(self, current: ToolRunners | None) -> None:
        """Give calls that begin from now on to other runners."""
        self._current = current

    async def wait_unused(self, runners: ToolRunners) -> None:
        """Return when former runners have no calls left."""
        await self._ended.wait_until(lambda: not self._calls[runners])

    def knows(self, name: str) -> bool | None:
        """Whether the current ones know it."""
        return False if self._current is None else self._current.knows(name)

    async def run(self, use: ToolUse) -> object:
        """Run a tool by the present runners."""
        runners = self._current
        if runners is None:
            raise UnknownTool(use.name)
        self._calls[runners] += 1
        try:
            return await runners.run(use)
        finally:
            self._calls[runners] -= 1
            if not self._calls[runners]:
                del self._calls[runners]
            self._ended.notify()
