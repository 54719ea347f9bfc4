"""A virtual clock: hours pass in milliseconds, and only when everybody waits."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import sniffio
import trio.testing

T = TypeVar("T")


def virtually(scenario: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on the clock; return what it returns."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    return anyio.run(scenario, backend="trio", backend_options={"clock": clock})


async def pass_time(seconds: float) -> None:
    """Let time pass that costs none."""
    assert sniffio.current_async_library() == "trio", "that would be a sleep"
    await anyio.sleep(seconds)
