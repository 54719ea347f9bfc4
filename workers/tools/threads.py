"""Calls of tools that are ordinary functions: each in a thread of its own, which can be left behind.

A thread cannot be stopped. A call that hangs for ever must neither keep this process from ending, which a pool's
threads would, nor take more and more memory: so many may run, hung ones included, and others wait for their turn. One
tool has no more than a quarter of them, so that one that hangs leaves room for the others.
"""

import contextlib
import contextvars
import logging
import threading
from asyncio import Future, get_running_loop
from collections.abc import Callable
from typing import Final

import anyio

MAX_THREADS: Final = 64
MAX_OF_ONE: Final = 16
TOLD_AGAIN_S: Final = 60.0
logger = logging.getLogger(__name__)


class ToolThreads:
    """Runs functions beside the event loop."""

    def __init__(self, limit: int = MAX_THREADS, limit_of_one: int = MAX_OF_ONE) -> None:
        self._limiter = anyio.CapacityLimiter(limit)
        self._limit_of_one = limit_of_one
        self._of_tool: dict[str, anyio.CapacityLimiter] = {}
        self._told_at = float("-inf")

    def __repr__(self) -> str:
        return f"<ToolThreads {self._limiter.borrowed_tokens}/{self._limiter.total_tokens:g}>"

    async def run(self, name: str, function: Callable[[], object]) -> object:
        """Run the function in a thread; return its result. If nobody waits any more, it goes on and its result is lost.

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
            except BaseException as raised:  # noqa: BLE001 - it is raised where the call is waited for
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
        """Say that a call has to wait for a thread: those that hang come back at no time."""
        full = own if not own.available_tokens else self._limiter
        if full.available_tokens or anyio.current_time() - self._told_at < TOLD_AGAIN_S:
            return
        self._told_at = anyio.current_time()
        whose = f"of the tool {name}" if full is own else "of Python tools"
        logger.error("all %g threads %s are taken; calls wait, and fail by tools.timeout_s", full.total_tokens, whose)


def _deliverable(error: BaseException) -> BaseException:
    if isinstance(error, StopIteration):  # no future takes one
        raised = RuntimeError(f"StopIteration: {error}")
        raised.__cause__ = error
        return raised
    return error
