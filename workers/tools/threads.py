"""Calls of tools that are ordinary functions: each in a thread of its own, which can be left behind.

A thread cannot be stopped. A call that hangs for ever must neither keep this process from ending, which a pool's
threads would, nor take more and more memory: so many may run, hung ones included, and others wait for their turn.
"""

import contextlib
import contextvars
import threading
from asyncio import Future, get_running_loop
from collections.abc import Callable
from typing import Final

import anyio

MAX_THREADS: Final = 64


class ToolThreads:
    """Runs functions beside the event loop."""

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self._limiter = anyio.CapacityLimiter(limit)

    def __repr__(self) -> str:
        return f"<ToolThreads {self._limiter.borrowed_tokens}/{self._limiter.total_tokens:g}>"

    async def run(self, name: str, function: Callable[[], object]) -> object:
        """Return what the function returns; one that is not waited for any more goes on, and its result is dropped.

        Raises:
            BaseException: whatever the function raises.
        """
        borrower = object()
        await self._limiter.acquire_on_behalf_of(borrower)
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
            raise
        return await result


def _deliverable(error: BaseException) -> BaseException:
    if isinstance(error, StopIteration):  # no future takes one
        raised = RuntimeError(f"StopIteration: {error}")
        raised.__cause__ = error
        return raised
    return error
