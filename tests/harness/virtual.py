"""A virtual clock: hours pass in milliseconds, and only when every task waits."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import sniffio
import trio.testing

from tests.harness.virtual_loop import VirtualLoop

T = TypeVar("T")


def virtually(scenario: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on the clock; return what it returns."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    return anyio.run(scenario, backend="trio", backend_options={"clock": clock})


async def pass_time(seconds: float) -> None:
    """Let virtual time pass."""
    is_virtual = sniffio.current_async_library() == "trio" or isinstance(asyncio.get_running_loop(), VirtualLoop)
    assert is_virtual, "that would be a sleep"
    await anyio.sleep(seconds)
