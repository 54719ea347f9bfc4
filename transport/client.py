"""The client of one engine at one address."""

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import anyio
import httpx
import msgspec
from msgspec.structs import replace

from transport.answer_bound import bound_of
from transport.bodies import LITTLE_AHEAD, UNPACKED, UnreadableBody, read_beginning, read_body
from transport.counters import EngineCounters, KvCache
from transport.dialects.dialect import BegunQuery, Dialect, EngineQuery, Post
from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.openai import CHAT_PATH, MODELS_PATH
from transport.endpoint import Endpoint
from transport.errors import (
    CannotAsk,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from transport.exchange import Exchange, Receiver
from transport.gathering import Gathering
from transport.kept import KeptConnections
from transport.relay import Passage, RelayExchange, RelayReceiver
from transport.request import ChatRequest, Thought
from transport.stream import ChatStream

T = TypeVar("T")
CONNECT_LIMIT_S: Final = 10.0  # loopback connects in microseconds; only a full accept backlog takes longer
CLOSED_S: Final = 1.0  # a kept connection that fails within it had been closed before; later, its engine has failed
EVENT_STREAM: Final = "text/event-stream"
OPTIONS: Final = "stream_options"
SHORT_TOKENS: Final = 16
PROBE_BYTES: Final = 1024 * 1024  # largest answer outside the token path
PROBE_LIMIT_S: Final = 5.0  # for one probe; the prober decides how many may fail
# AttributeError: anyio asks a socket for its peer after it was lost in the moment it connected.
LOST: Final = (httpx.HTTPError, OSError, AttributeError)
REFUSAL_BYTES: Final = 200
_OK: Final = 200
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class EngineClient:
    """Speaks a dialect to the engine at an endpoint; idle connections may be kept for a moment."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect = LLAMA_SERVER) -> None:
        self.endpoint = endpoint
        self.dialect = dialect
        self._heads: dict[tuple[str, str, str], bytes] = {}
        self._tls = endpoint.tls()
        self._gathering = Gathering()
        self._kept = KeptConnections()
        self._takes_options = True  # until it refuses them
        # A server that once gave a finish reason always does: from then on an answer without one was broken off.
        self._tells_reason = dialect.tells_reason

    def close_idle(self) -> None:
        """Close the idle connections."""
        self._kept.close()

    def use_key(self, key: str) -> None:
        """Send this key with every request from now on: the engine that is starting requires it."""
        headers = {**self.endpoint.headers, "Authorization": f"Bearer {key}"}
        self.endpoint = replace(self.endpoint, headers=headers)
        self._heads.clear()

    def __repr__(self) -> str:
        return f"<EngineClient {self.dialect.name} {self.endpoint} {self._gathering!r}>"

    async def probe_ready(self) -> None:
        """Return when the engine is ready: at least GET /v1/models answers 200 with JSON.

        Raises:
            EngineUnreachable: nothing answers.
            EngineTimeout: no answer in time.
            EngineRejected: an answer other than 200.
            EngineProtocolError: the answer is not JSON.

        Source: specification, "Readiness probe".
        """
        *_, models = await self._get_all(self.dialect.ready_paths)
        try:
            msgspec.json.decode(models)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(f"GET {MODELS_PATH} answered 200 with no JSON: {error}") from error

    async def read_counters(self) -> EngineCounters | None:
        """Return the engine's counters of its own work; None if its dialect has none.

        Raises:
            EngineError: no answer now; some builds hold the answer back for a whole batch.
        """
        return await self._read(self.dialect.counters) if self.dialect.counters else None

    async def read_capacity(self) -> int | None:
        """Return how many requests the engine reports it can hold at once; None if it does not report that.

        Raises:
            EngineError: it does not answer.
        """
        return await self._read(self.dialect.capacity) if self.dialect.capacity else None

    async def read_kv_cache(self) -> KvCache | None:
        """Return the size and use of the engine's KV cache; None if it does not report them.

        Raises:
            EngineError: it does not answer.
        """
        return await self._read(self.dialect.kv_cache) if self.dialect.kv_cache else None

    async def read_thought(self, params: Mapping[str, object]) -> Thought:
        """Return the thought that the model's template puts before an answer, given parameters that shape a prompt.

        Raises:
            EngineError: it does not answer, or does not know.
        """
        query = self.dialect.thoughts
        if query is None:
            return Thought.NONE
        body = {**params, "messages": [{"role": "user", "content": "?"}]}
        async with open_http(self.endpoint, self._tls) as client:
            rendered = await _get(client, self.endpoint, query.render_path, body)
            return query.decode(rendered, await _get(client, self.endpoint, query.path))

    async def count_prompt(self, chat: bytes) -> int | None:
        """Return the prompt tokens of a request's body; None if the engine does not count them.

        Raises:
            EngineError: it does not answer.
        """
        query = self.dialect.count
        if query is None:
            return None
        async with open_http(self.endpoint, self._tls) as client:
            return query.decode(await _get(client, self.endpoint, query.path, chat))

    async def ask_about_beginnings(self, ask: Callable[[BegunQuery, Post], Awaitable[T]]) -> T | None:
        """Return the engine's answer about beginnings of answers; None from engines that go on with none.

        Raises:
            EngineError: it does not answer.
        """
        query = self.dialect.begun
        async with open_http(self.endpoint, self._tls) as client:
            return None if query is None else await ask(query, partial(_get, client, self.endpoint))

    async def read_version(self) -> bytes:
        """Return the engine's answer to GET /version.

        Raises:
            EngineError: it does not answer, or reports no version.
        """
        async with open_http(self.endpoint, self._tls) as client:
            return await _get(client, self.endpoint, "/version")

    async def _read(self, reading: EngineQuery[T]) -> T:
        return reading.decode(*await self._get_all(reading.paths))

    async def _get_all(self, paths: Sequence[str]) -> list[bytes]:
        async with open_http(self.endpoint, self._tls) as client:
            return [await _get(client, self.endpoint, path) for path in paths]

    async def stream(self, request: ChatRequest, receiver: Receiver, scope: str | None = None) -> None:
        """Send ``request`` and return when its answer is complete; ``receiver`` gets each event as it comes.

        The answer has no time limit: the caller watches ``receiver`` and cancels. Cancelling closes the connection,
        which tells the engine to stop. The connection is kept for the same ``scope``.

        Raises:
            EngineError: any of its leaves; events received before the failure stand.
        """
        body, has_options = self.dialect.encode(request), self._takes_options
        if not has_options:
            body = _without_options(body)
        try:
            await self._stream(request, body, receiver, scope)
        except EngineRejected as error:
            if not (has_options and error.is_about_the_request and OPTIONS in error.message):
                raise
            self._takes_options = False  # some servers do not know the field, and say so
        else:
            return
        await self._stream(request, _without_options(body), receiver, scope)

    async def _stream(self, request: ChatRequest, body: bytes, receiver: Receiver, scope: str | None) -> None:
        loop = asyncio.get_running_loop()
        gathering = None if request.is_watched or is_short(request.params) else self._gathering
        # The end of a kept connection wakes no reader that waits for more bytes than came.
        keeps = self.dialect.keeps_connections and gathering is None
        head = self._head(CHAT_PATH, EVENT_STREAM, keeps=keeps)

        stream: ChatStream | None = None

        def exchange() -> Exchange:
            nonlocal stream
            stream = ChatStream(tells_reason=self._tells_reason)
            return Exchange(_message(head, body), receiver, loop.create_future(), stream=stream, gathering=gathering)

        await self._ask(exchange, scope, keeps=keeps)
        self._tells_reason |= stream is not None and stream.has_reason

    async def relay(
        self, path: str, body: bytes, receiver: RelayReceiver, passage: Passage, scope: str | None = None
    ) -> None:
        """POST a body unchanged and return when its answer is complete; ``passage`` gets the answer as it comes.

        ``receiver`` gets the model's progress, as far as the answer shows it. The connection is kept for the same
        ``scope``.

        Raises:
            EngineError: any of its leaves; bytes that went through the passage before stand.
        """
        loop, keeps = asyncio.get_running_loop(), self.dialect.keeps_connections
        head = self._head(path, "*/*", keeps=keeps)

        def exchange() -> RelayExchange:
            return RelayExchange(_message(head, body), receiver, loop.create_future(), passage)

        await self._ask(exchange, scope, keeps=keeps)

    def _head(self, path: str, accept: str, *, keeps: bool) -> bytes:
        about = (path, accept, "keep-alive" if keeps else "close")
        if about not in self._heads:
            self._heads[about] = self.endpoint.head(*about)
        return self._heads[about]

    async def _ask(self, exchange: Callable[[], Exchange], scope: str | None, *, keeps: bool) -> None:
        """Perform an exchange on a kept connection if there is one; on a fresh one if that had been closed."""
        is_second = False
        kept = exchange() if keeps and len(self._kept) else None
        transport = None if kept is None else self._kept.take(kept, scope)
        if kept is not None and transport is not None:
            sent_at = anyio.current_time()
            try:
                await self._finish(kept, transport, scope, keeps=keeps)
            except EngineUnreachable:
                if kept.is_answered or anyio.current_time() - sent_at > CLOSED_S:
                    raise
            else:
                return
            is_second = True
        fresh = exchange()
        transport = await self._open(fresh)
        try:
            await self._finish(fresh, transport, scope, keeps=keeps)
        except EngineUnreachable as error:
            if not is_second:
                raise
            raise EngineUnreachable(f"{error}; it was sent twice, before that on a kept connection") from error
        finally:
            del fresh  # as in `_finish`

    async def _open(self, exchange: Exchange) -> asyncio.Transport:
        is_open = False
        try:
            with anyio.fail_after(CONNECT_LIMIT_S):
                transport = await self._connect(exchange)
            is_open = True
        except TimeoutError as error:
            raise EngineTimeout("connection", CONNECT_LIMIT_S) from error
        except OSError as error:
            raise connection_error(error, f"cannot connect to {self.endpoint}: ") from error
        finally:
            if not is_open:
                exchange.give_up()
        return transport

    async def _finish(
        self, exchange: Exchange, transport: asyncio.Transport, scope: str | None, *, keeps: bool
    ) -> None:
        """Wait for the end of an answer; keep its connection if the answer is whole and leaves it open."""
        is_kept = False
        try:
            await exchange.finished
            is_kept = keeps and exchange.leaves_open
        except asyncio.CancelledError:
            if isinstance(exchange, RelayExchange):
                exchange.read_rest()
            raise
        finally:
            exchange.stop_gathering()
            if is_kept:
                self._kept.keep(transport, scope)
            else:
                transport.abort()
            del exchange  # a failure keeps this frame, which would keep the exchange and all that it holds

    async def _connect(self, exchange: Exchange) -> asyncio.Transport:
        loop, at = asyncio.get_running_loop(), self.endpoint
        if at.uds is not None:
            return (await loop.create_unix_connection(lambda: exchange, at.uds))[0]
        return (await loop.create_connection(lambda: exchange, at.host, at.port, ssl=self._tls))[0]


def is_short(params: Mapping[str, object]) -> bool:
    """Whether an answer's bound in tokens is so small that gathering its reads saves nothing."""
    bound = bound_of(params)
    return bound is not None and bound <= SHORT_TOKENS


async def _get(
    client: httpx.AsyncClient, endpoint: Endpoint, path: str, body: Mapping[str, object] | bytes | None = None
) -> bytes:
    """Return the answer to GET, or to POST if there is a body."""
    content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {} if content is None else {"Content-Type": "application/json"}
    method, path = "GET" if body is None else "POST", endpoint.path_of(path)
    try:
        with anyio.fail_after(PROBE_LIMIT_S):  # for the whole answer; httpx's own limits apply to each read
            async with client.stream(method, path, content=content, headers=headers) as response:
                if response.status_code != _OK:
                    words = await read_beginning(response, REFUSAL_BYTES)
                    text = words.decode("utf-8", "replace").strip() or "no words"
                    raise EngineRejected(response.status_code, "", f"{text} ({method} {endpoint.base_url}{path})")
                return await read_body(response, PROBE_BYTES)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise EngineTimeout(f"answer to {method} {path}", PROBE_LIMIT_S) from error
    except UnreadableBody as error:
        raise EngineProtocolError(f"{method} {path}: {error}") from error
    except LOST as error:
        raise connection_error(error) from error


def _without_options(body: bytes) -> bytes:
    """Return a body that does not ask for usage; the server may send it all the same."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop(OPTIONS, None)
    return msgspec.json.encode(fields)


def _message(head: bytes, body: bytes) -> bytes:
    return b"%s%d\r\n\r\n%s" % (head, len(body), body)


def open_http(endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """Return a client for one engine; its user bounds the time.

    No proxy of the environment may come between us and the engine. Without TLS no context is made: making one would
    hold the event loop for 20 ms.
    """
    return httpx.AsyncClient(
        base_url=endpoint.base_url,
        params=endpoint.query or None,
        headers={**UNPACKED, **endpoint.headers},
        timeout=None,  # noqa: S113
        trust_env=False,
        transport=httpx.AsyncHTTPTransport(
            uds=endpoint.uds, verify=tls or False, trust_env=False, socket_options=LITTLE_AHEAD
        ),
    )


def connection_error(error: BaseException, where: str = "") -> EngineError:
    """Return the error behind a failed connection: the engine's, or a lack of resources here."""
    text = f"{where}{str(error) or type(error).__name__}"
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno in _OURS for cause in causes):
        return CannotAsk(text)
    return EngineUnreachable(text, is_refused=any(isinstance(cause, ConnectionRefusedError) for cause in causes))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes, those of each address tried among them."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            yield from cause.exceptions
        cause = cause.__cause__ or cause.__context__
