"""The seam to whatever runs tools, and the runner of Python callables."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio.to_thread

from workers.errors import UnknownTool

Callables = Mapping[str, Callable[..., object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One call that is to be run; ``arguments`` fit the tool's schema. ``job_name`` is the caller's, to correlate."""

    call_id: str
    name: str
    arguments: Mapping[str, object]
    job_name: str


class ToolRunner(Protocol):
    """Runs one call at a time, several at the same time; it may be cancelled at any moment."""

    def knows(self, name: str) -> bool:
        """Whether a call of that name may be given to this runner."""

    async def run(self, use: ToolUse) -> object:
        """Return the result as anything that is JSON; an outcome that disappoints is a result like any other.

        Raises:
            UnknownTool: there is no tool of that name.
            Exception: the tool could not be run, which ends the request (seed 002, section 13).
        """


class PythonTools:
    """Runs callables of this process: coroutine functions in the event loop, all others in a thread."""

    def __init__(self, callables: Callables) -> None:
        self._callables = dict(callables)

    def __repr__(self) -> str:
        """State which there are."""
        return f"<PythonTools {sorted(self._callables)}>"

    def knows(self, name: str) -> bool:
        """Whether there is a callable of that name."""
        return name in self._callables

    async def run(self, use: ToolUse) -> object:
        """Call it with the arguments as keywords."""
        function = self._callables.get(use.name)
        if function is None:
            raise UnknownTool(use.name)
        if inspect.iscoroutinefunction(function):
            awaited: Awaitable[object] = function(**use.arguments)
            return await awaited
        # A thread cannot be stopped: a call that outlives its limit goes on by itself, and its result is dropped.
        result = await anyio.to_thread.run_sync(lambda: function(**use.arguments), abandon_on_cancel=True)
        return await result if inspect.isawaitable(result) else result


class ToolRunners:
    """Several runners as one: the first that knows a name runs it."""

    def __init__(self, runners: Sequence[ToolRunner]) -> None:
        self._runners = tuple(runners)

    def __repr__(self) -> str:
        """State which there are."""
        return f"<ToolRunners {list(self._runners)}>"

    def knows(self, name: str) -> bool:
        """Whether any of them knows it."""
        return any(runner.knows(name) for runner in self._runners)

    async def run(self, use: ToolUse) -> object:
        """Have it run."""
        for runner in self._runners:
            if runner.knows(use.name):
                return await runner.run(use)
        raise UnknownTool(use.name)
