"""The client of one engine at one address."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import anyio
import httpx
import msgspec

from transport.answer_bound import bound_of
from transport.bodies import LITTLE_AHEAD, UNPACKED, UnreadableBody, read_beginning, read_body
from transport.counters import EngineCounters, KvCache
from transport.dialects.dialect import BegunQuery, Dialect, EngineQuery
from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.openai import CHAT_PATH, MODELS_PATH
from transport.dialects.recording import PLAIN_ANSWERS, Post
from transport.endpoint import Endpoint
from transport.engine_connections import EngineConnections, connection_error
from transport.errors import (
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
)
from transport.exchange import Exchange, Receiver
from transport.gathering import Gathering
from transport.plain_exchange import PlainExchange
from transport.relay import Passage, RelayExchange, RelayReceiver
from transport.request import ChatRequest, Thought
from transport.stream import ChatStream

T = TypeVar("T")
EVENT_STREAM: Final = "text/event-stream"
OPTIONS: Final = "stream_options"
SHORT_TOKENS: Final = 16
PROBE_BYTES: Final = 1024 * 1024  # largest answer outside the token path
PROBE_LIMIT_S: Final = 5.0  # for one probe; the prober decides how many may fail
# AttributeError: anyio asks a socket for its peer after it was lost in the moment it connected.
LOST: Final = (httpx.HTTPError, OSError, AttributeError)
REFUSAL_BYTES: Final = 200
_OK: Final = 200


class EngineClient:
    """Speaks a dialect to the engine at an endpoint; idle connections may be kept for a moment."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect = LLAMA_SERVER) -> None:
        self.dialect = dialect
        self._gathering = Gathering()
        self._connections = EngineConnections(endpoint)
        self._takes_options = True  # until it refuses them
        # A server that once gave a finish reason always does: from then on an answer without one was broken off.
        self._tells_reason = dialect.tells_reason

    @property
    def endpoint(self) -> Endpoint:
        """The address of the engine."""
        return self._connections.endpoint

    def close_idle(self) -> None:
        """Close the idle connections."""
        self._connections.close_idle()

    def use_key(self, key: str) -> None:
        """Send this key with every request from now on: the engine that is starting requires it."""
        self._connections.use_key(key)

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
        async with open_http(self.endpoint, self._connections.tls) as client:
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
        async with open_http(self.endpoint, self._connections.tls) as client:
            return query.decode(await _get(client, self.endpoint, query.path, chat))

    async def ask_about_beginnings(self, ask: Callable[[BegunQuery, Post], Awaitable[T]]) -> T | None:
        """Return the engine's answer about beginnings of answers; None from engines that go on with none.

        Raises:
            EngineError: it does not answer.
        """
        query = self.dialect.begun
        async with open_http(self.endpoint, self._connections.tls) as client:
            return None if query is None else await ask(query, partial(_get, client, self.endpoint))

    async def read_version(self) -> bytes:
        """Return the engine's answer to GET /version.

        Raises:
            EngineError: it does not answer, or reports no version.
        """
        async with open_http(self.endpoint, self._connections.tls) as client:
            return await _get(client, self.endpoint, "/version")

    async def _read(self, reading: EngineQuery[T]) -> T:
        return reading.decode(*await self._get_all(reading.paths))

    async def _get_all(self, paths: Sequence[str]) -> list[bytes]:
        async with open_http(self.endpoint, self._connections.tls) as client:
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
        head = self._connections.head(CHAT_PATH, EVENT_STREAM, keeps=keeps)

        stream: ChatStream | None = None
        readers = (self.dialect.recording if request.records else None) or PLAIN_ANSWERS

        def exchange() -> Exchange:
            nonlocal stream
            stream = ChatStream(readers=readers, tells_reason=self._tells_reason)
            return Exchange(_message(head, body), receiver, loop.create_future(), stream=stream, gathering=gathering)

        await self._connections.perform(exchange, scope, keeps=keeps)
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
        head = self._connections.head(path, "*/*", keeps=keeps)

        def exchange() -> RelayExchange:
            return RelayExchange(_message(head, body), receiver, loop.create_future(), passage)

        await self._connections.perform(exchange, scope, keeps=keeps)

    async def post(self, path: str, body: bytes) -> bytes:
        """Return the answer to a short question beside a chat.

        Raises:
            EngineError: it does not answer.
        """
        loop, keeps = asyncio.get_running_loop(), self.dialect.keeps_connections
        head, asked = self._connections.head(path, "application/json", keeps=keeps), list[PlainExchange]()

        def exchange() -> PlainExchange:
            asked.append(PlainExchange(_message(head, body), loop.create_future()))
            return asked[-1]

        try:
            with anyio.fail_after(PROBE_LIMIT_S):
                await self._connections.perform(exchange, None, keeps=keeps)
        except TimeoutError as error:
            raise EngineTimeout(f"answer to POST {path}", PROBE_LIMIT_S) from error
        return asked[-1].body


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
