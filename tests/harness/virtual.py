"""A virtual clock: hours pass in milliseconds, and only when everybody waits."""

from collections.abc import Awaitable, Callable

import anyio
import sniffio
import trio.testing


def virtually(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function on the clock."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(scenario, backend="trio", backend_options={"clock": clock})


async def pass_time(seconds: float) -> None:
    """Let time pass that costs none."""
    assert sniffio.current_async_library() == "trio", "that would be a sleep"
    await anyio.sleep(seconds)
