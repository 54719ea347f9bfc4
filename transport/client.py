"""The client of one engine at one address. It knows neither processes nor jobs."""

import asyncio
import errno
from typing import Final

import anyio
import httpx
import msgspec

from transport.counters import EngineCounters
from transport.dialects import llama_server
from transport.errors import (
    CannotAsk,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from transport.exchange import Exchange, Receiver
from transport.request import ChatRequest

CONNECT_LIMIT_S: Final = 10.0  # loopback connects in microseconds; only a full accept backlog takes longer
PROBE_LIMIT_S: Final = 5.0  # one probe; whoever probes decides how many may fail
_OK: Final = 200
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class EngineClient:
    """Speaks llama-server's dialect to the engine at ``host:port``; holds no connection between calls."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._head = (
            f"POST {llama_server.CHAT_PATH} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\n"
            "Accept: text/event-stream\r\nConnection: close\r\nContent-Length: "
        ).encode("ascii")
        self._base_url = f"http://{authority}"

    def __repr__(self) -> str:
        """State where the engine is."""
        return f"<EngineClient {self._base_url}>"

    async def probe_ready(self) -> None:
        """Return when GET /v1/models answers 200 with JSON (seed 002, section 11); it is asked once.

        Raises:
            EngineUnreachable: nobody answers.
            EngineTimeout: no answer in time.
            EngineRejected: an answer other than 200.
            EngineProtocolError: an answer that is no JSON.
        """
        body = await self._get(llama_server.MODELS_PATH)
        try:
            msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(f"GET {llama_server.MODELS_PATH} answered 200 with no JSON: {error}") from error

    async def read_counters(self) -> EngineCounters:
        """Return what the engine says of its own work (GET /slots); it is asked once.

        Raises:
            EngineError: it does not say, or not now: older builds hold the answer back for a whole batch.
        """
        return llama_server.decode_slots(await self._get(llama_server.SLOTS_PATH))

    async def read_capacity(self) -> int | None:
        """Return how many requests the engine says it can hold at once (GET /props); None where it does not say.

        Raises:
            EngineError: it does not answer.
        """
        return llama_server.decode_props(await self._get(llama_server.PROPS_PATH))

    async def _get(self, path: str) -> bytes:
        # No proxy of the environment may come between us and the engine; and no TLS context is made, which would hold
        # the event loop for 20 ms a probe and never be used.
        async with httpx.AsyncClient(base_url=self._base_url, trust_env=False, verify=False, timeout=None) as client:  # noqa: S113, S501
            try:
                with anyio.fail_after(PROBE_LIMIT_S):  # over the whole answer; httpx's own limits are on each read
                    response = await client.get(path)
            except (TimeoutError, httpx.TimeoutException) as error:
                raise EngineTimeout(f"answer to GET {path}", PROBE_LIMIT_S) from error
            except (httpx.HTTPError, OSError) as error:
                raise _connection_error(error) from error
        if response.status_code != _OK:
            raise EngineRejected(response.status_code, "", response.text[:200])
        return response.content

    async def stream(self, request: ChatRequest, receiver: Receiver) -> None:
        """Send ``request`` and return when its answer is complete; ``receiver`` gets each event as it comes.

        There is no limit on the answer's length in time: whoever calls watches ``receiver`` and cancels. A cancel
        closes the connection, which is how an engine is told to stop.

        Raises:
            EngineError: any of its leaves; events received before the failure stand.
        """
        body = llama_server.encode(request)
        loop = asyncio.get_running_loop()
        exchange = Exchange(b"%s%d\r\n\r\n%s" % (self._head, len(body), body), receiver, loop.create_future())
        try:
            with anyio.fail_after(CONNECT_LIMIT_S):
                transport, _ = await loop.create_connection(lambda: exchange, self._host, self._port)
        except TimeoutError as error:
            raise EngineTimeout("connection", CONNECT_LIMIT_S) from error
        except OSError as error:
            raise _connection_error(error, f"cannot connect to {self._host}:{self._port}: ") from error
        try:
            await exchange.finished
        finally:
            transport.abort()


def _connection_error(error: BaseException, where: str = "") -> EngineError:
    text = f"{where}{str(error) or type(error).__name__}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OURS:
            return CannotAsk(text)
        cause = cause.__cause__ or cause.__context__
    return EngineUnreachable(text)
