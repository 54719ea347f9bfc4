"""The driver for asyncio: takes the steps of flows with ``httpx.AsyncClient``."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, assert_never

import httpx

from roundhouse_client.drivers.exchange import Address, head_of, reply_of, translated
from roundhouse_client.drivers.ordinary import OnPause
from roundhouse_client.errors import RoundhouseError
from roundhouse_client.flows.steps import Flow, Give, Gives, Now, Open, Pause, Read, Runner, Send, Step
from roundhouse_client.request import Reply, Request

T = TypeVar("T")


class AsyncDriver:
    """Runs flows against one service; any number of tasks of one event loop may use one."""

    def __init__(self, address: Address, http: httpx.AsyncClient | None, on_pause: OnPause | None) -> None:
        self._address = address
        self._is_ours = http is None
        self._http = httpx.AsyncClient(trust_env=False) if http is None else http
        self._on_pause = on_pause

    def __repr__(self) -> str:
        return f"<AsyncDriver {self._address!r}>"

    async def close(self) -> None:
        """Close all connections, unless the caller owns them."""
        if self._is_ours:
            await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end; return its result."""
        runner = Runner(flow)
        async with aclosing(self._drive(runner)) as given:
            async for _ in given:
                raise TypeError("a flow that gives values is streamed")
        return runner.result

    def stream(self, gives: Gives[T]) -> AsyncGenerator[T, None]:
        """Yield a flow's values; its connection is closed with the generator."""
        return self._drive(Runner(gives.flow))

    async def _drive(self, runner: Runner[Any]) -> AsyncGenerator[Any, None]:
        async with _AsyncExchange(self._address, self._http, self._on_pause) as exchange:
            step = runner.begin()
            while step is not None:
                if isinstance(step, Give):
                    yield step.value
                    step = runner.answer(None)
                    continue
                try:
                    outcome = await exchange.take(step)
                except RoundhouseError as error:
                    step = runner.fail(error)
                else:
                    step = runner.answer(outcome)


class _AsyncExchange:
    """Takes the steps of one flow, which may have one answer open."""

    def __init__(self, address: Address, http: httpx.AsyncClient, on_pause: OnPause | None) -> None:
        self._address = address
        self._http = http
        self._on_pause = on_pause
        self._opened: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def take(self, step: Step) -> object:
        match step:
            case Send():
                with translated(self._address.url):
                    return reply_of(await self._http.request(**self._address.arguments(step.request)))
            case Open():
                return await self._open(step.request)
            case Read():
                with translated(self._address.url):
                    return b"" if self._chunks is None else await anext(self._chunks, b"")
            case Pause():
                if self._on_pause is not None:
                    self._on_pause(step)
                await asyncio.sleep(step.seconds)
                return None
            case Now():
                return time.monotonic()
            case Give():
                raise TypeError("values are given by the driver")
        assert_never(step)

    async def _open(self, request: Request) -> Reply:
        await self._close()
        with translated(self._address.url):
            response = await self._http.send(self._http.build_request(**self._address.arguments(request)), stream=True)
            self._opened, self._chunks = response, response.aiter_bytes()
            if response.is_success:
                return head_of(response)
            await response.aread()
        return reply_of(response)

    async def _close(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()
            self._opened = self._chunks = None
