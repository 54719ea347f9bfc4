"""The driver for ordinary code: takes the steps of flows with ``httpx.Client``."""

import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Final, Self, TypeVar, assert_never

import httpx

from roundhouse_client.drivers.exchange import Address, head_of, reply_of, translated
from roundhouse_client.errors import RoundhouseError
from roundhouse_client.flows.steps import Flow, Give, Gives, Now, Open, Pause, Read, Runner, Send, Step
from roundhouse_client.request import Reply, Request

T = TypeVar("T")
OnPause = Callable[[Pause], None]
_NOTHING: Final[Iterator[bytes]] = iter(())


class Driver:
    """Runs flows against one service; several threads may use one."""

    def __init__(self, address: Address, http: httpx.Client | None, on_pause: OnPause | None) -> None:
        self._address = address
        self._is_ours = http is None
        self._http = httpx.Client(trust_env=False) if http is None else http
        self._on_pause = on_pause

    def __repr__(self) -> str:
        return f"<Driver {self._address!r}>"

    def close(self) -> None:
        """Close all connections, unless the caller owns them."""
        if self._is_ours:
            self._http.close()

    def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end; return its result."""
        runner = Runner(flow)
        for _ in self._drive(runner):
            raise TypeError("a flow that gives values is streamed")
        return runner.result

    def stream(self, gives: Gives[T]) -> Generator[T, None, None]:
        """Yield a flow's values; its connection is closed with the generator."""
        return self._drive(Runner(gives.flow))

    def _drive(self, runner: Runner[Any]) -> Generator[Any, None, None]:
        with _Exchange(self._address, self._http, self._on_pause) as exchange:
            step = runner.begin()
            while step is not None:
                if isinstance(step, Give):
                    yield step.value
                    step = runner.answer(None)
                    continue
                try:
                    outcome = exchange.take(step)
                except RoundhouseError as error:
                    step = runner.fail(error)
                else:
                    step = runner.answer(outcome)


class _Exchange:
    """Takes the steps of one flow, which may have one answer open."""

    def __init__(self, address: Address, http: httpx.Client, on_pause: OnPause | None) -> None:
        self._address = address
        self._http = http
        self._on_pause = on_pause
        self._opened: httpx.Response | None = None
        self._chunks: Iterator[bytes] = _NOTHING

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def take(self, step: Step) -> object:
        match step:
            case Send():
                with translated(self._address.url):
                    return reply_of(self._http.request(**self._address.arguments(step.request)))
            case Open():
                return self._open(step.request)
            case Read():
                with translated(self._address.url):
                    return next(self._chunks, b"")
            case Pause():
                if self._on_pause is not None:
                    self._on_pause(step)
                time.sleep(step.seconds)
                return None
            case Now():
                return time.monotonic()
            case Give():
                raise TypeError("values are given by the driver")
        assert_never(step)

    def _open(self, request: Request) -> Reply:
        self._close()
        with translated(self._address.url):
            response = self._http.send(self._http.build_request(**self._address.arguments(request)), stream=True)
            self._opened, self._chunks = response, response.iter_bytes()
            if response.is_success:
                return head_of(response)
            response.read()
        return reply_of(response)

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened, self._chunks = None, _NOTHING
