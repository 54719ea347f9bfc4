"""A client's patience applies to all its calls, unless a method gets its own."""

from collections.abc import Callable
from typing import Any

import pytest

from roundhouse_client import AsyncClient, Client, Unreachable
from roundhouse_client.flows.steps import Pause
from tests.harness.ports import find_ports

FLOWS: list[Callable[..., Any]] = [
    lambda client, **more: client.wait_job("j", **more),
    lambda client, **more: client.say("j", "c", "Hi.", **more),
    lambda client, **more: client.fork("j", **more),
    lambda client, **more: list(client.follow_job("j", **more)),
    lambda client, **more: list(client.follow_log("w", **more)),
    lambda client, **more: list(client.read_jobs(**more)),
    lambda client, **more: list(client.read_result("j", **more)),
    lambda client, **more: list(client.download_result("j", "csv", **more)),
]


class Waits(Exception):
    """It would wait."""


def no_wait(_pause: Pause) -> None:
    raise Waits


@pytest.mark.parametrize("flow", FLOWS)
def test_a_client_without_patience_does_not_wait(flow: Callable[..., Any]) -> None:
    """Waits and streams once waited for a minute."""
    url = f"http://127.0.0.1:{find_ports(1)}"
    with Client(url, patience_s=0, on_pause=no_wait) as client:
        with pytest.raises(Unreachable):
            flow(client)
        with pytest.raises(Waits):
            flow(client, patience_s=5.0)
    with Client(url, on_pause=no_wait) as client, pytest.raises(Waits):
        flow(client)


async def test_an_asyncio_client_without_patience_does_not_wait() -> None:
    """The same as the blocking client."""
    async with AsyncClient(f"http://127.0.0.1:{find_ports(1)}", patience_s=0, on_pause=no_wait) as client:
        with pytest.raises(Unreachable):
            await client.wait_job("j")
        with pytest.raises(Unreachable):
            [event async for event in client.follow_job("j")]
        with pytest.raises(Waits):
            await client.wait_job("j", patience_s=5.0)
