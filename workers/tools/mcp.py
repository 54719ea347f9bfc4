"""Tools of MCP servers: programs that we start (stdio) and servers elsewhere (streamable HTTP), through the MCP SDK.

The SDK is imported when the first server is configured: it costs half a second and 30 MB.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, cast

import anyio
import msgspec

from workers.distribution import own_version
from workers.errors import ToolRunFailed, UnknownTool
from workers.policy.restart import Backoff
from workers.process.handed_over import HeldServer, HeldTool
from workers.tools.results import MAX_RESULT_BYTES
from workers.tools.runner import ToolUse
from workers.tools.server_log import StderrLog

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, RequestParamsMeta

    from workers.tools.stdio import StdioLink

CONNECT_LIMIT_S: Final = 60.0  # the first start of a server may fetch its packages
RECONNECTS: Final = Backoff(first_s=0.5, last_s=30.0)
PING_AFTER_S: Final = 1.0  # without a message from the server
PING_LIMIT_S: Final = 5.0
MOST_TOOLS: Final = 10_000
MOST_PAGES: Final = 100  # pages of a list of tools
LISTING_S: Final = 1.0  # how long a listing stays valid
LIST_LIMIT_S: Final = 2.0  # a posted job waits for it
SPARED_S: Final = 30.0  # pause in listing a server that did not answer in time: it is busy or hangs
logger = logging.getLogger(__name__)


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server: a program and its additional environment, or an address and its headers."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    url: str | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def launch(self) -> str:
        """A digest of its program's command and environment: another digest is another server."""
        text = json.dumps([self.command, sorted(self.env.items())])
        return hashlib.sha256(text.encode()).hexdigest()


class ListedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as its server lists it; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, object]


class McpState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one server: ``tools`` counts those that it listed last, None if it was never reached.

    ``trouble`` is why it is not connected, None while it is.
    """

    name: str
    tools: int | None
    trouble: str | None


class McpTools:
    """The tools of one server; ``run_connection`` must be running, and reconnects whenever the connection ends.

    A call in progress when the connection ends fails, since its effect is unknown; one that comes during connecting
    waits. ``left`` is the server as an earlier program of this process handed it over: the first connection continues
    its session.
    """

    def __init__(self, server: McpServer, environment: Mapping[str, str], left: HeldServer | None = None) -> None:
        self._server = server
        self._environment = environment
        self._left = left
        self._stderr = StderrLog(server.name)
        self._link: StdioLink | None = None
        self._client: Client | None = None
        self.listed: tuple[ListedTool, ...] | None = None  # last listing, None if there was none
        self._names: frozenset[str] = frozenset()
        self._trouble = "not connected yet"
        self._broken = anyio.Event()
        self._settled = anyio.Event()  # the present try to connect has succeeded or failed
        self._asking = anyio.Lock()
        self._connections = 0
        self._calls = 0
        self._heard_at = 0.0
        self._list_due_at = 0.0

    def __repr__(self) -> str:
        state = "connected" if self._client else self._trouble
        return f"<McpTools {self._server.name}: {state}, {len(self._names)} tools>"

    @property
    def state(self) -> McpState:
        """The state of the server; one that died while idle is noticed at the next call."""
        return McpState(
            name=self._server.name,
            tools=None if self.listed is None else len(self.listed),
            trouble=None if self._client else self._trouble,
        )

    @property
    def calls(self) -> int:
        """The number of calls that wait for the server's answer."""
        return self._calls

    def knows(self, name: str) -> bool | None:
        """Whether the server listed that tool; None if it was never reached."""
        return None if self.listed is None else name in self._names

    async def list_again(self) -> None:
        """List the tools of a connected server again; if it does not answer in time, its last listing stands."""
        client = self._client
        if client is None or anyio.current_time() < self._list_due_at:
            return
        self._list_due_at = anyio.current_time() + SPARED_S  # unless it answers; no other caller asks meanwhile
        with anyio.move_on_after(LIST_LIMIT_S):
            listed = await _listing(client)
            if client is self._client and listed is not None:
                self._heard_at = anyio.current_time()
                self._take(listed)

    async def wait_settled(self) -> None:
        """Return when the present try to connect has succeeded or failed; the caller bounds the wait."""
        await self._settled.wait()

    def hand_over_server(self, model: str) -> HeldServer | None:
        """Return the server for the next program to take over; None without a session to keep.

        Requests in progress are not handed over: their answers are dropped.
        """
        link = self._link.hand_over_link() if self._client is not None and self._link is not None else None
        if self._client is None or link is None:
            return None
        session = self._client.session
        negotiated = session.discover_result or session.initialize_result
        if negotiated is None:
            return None
        return HeldServer(
            model=model,
            name=self._server.name,
            launch=self._server.launch,
            link=link,
            negotiated=negotiated.model_dump_json(by_alias=True, exclude_none=True),
            is_discovered=session.discover_result is not None,
            tools=[
                HeldTool(name=tool.name, description=tool.description, parameters=dict(tool.parameters))
                for tool in self.listed or ()
            ],
        )

    async def run(self, use: ToolUse) -> object:
        """Run a tool on the server; the tool's own error is a result, for the model to see."""
        from mcp.shared.exceptions import MCPError  # noqa: PLC0415 - see above
        from mcp.types import CONNECTION_CLOSED, METHOD_NOT_FOUND  # noqa: PLC0415

        client = await self._connected()
        self._calls += 1
        try:
            result = await client.call_tool(use.name, dict(use.arguments), meta=_meta(use))
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                self._break()
            if error.error.code == METHOD_NOT_FOUND:
                raise UnknownTool(use.name) from error
            raise ToolRunFailed(f"the MCP server {self._server.name}: {error}") from error
        except (RuntimeError, ValueError) as error:  # the answer breaks the protocol
            raise ToolRunFailed(f"the MCP server {self._server.name}: {_say(error)}") from error
        finally:
            self._calls -= 1
        self._heard_at = anyio.current_time()
        return _plain(result)

    async def run_connection(self) -> None:
        """Stay connected until cancelled."""
        failures = 0
        while True:
            before, was_left = self._connections, self._left is not None
            try:
                await self._stay_connected()
                has_ended = self._connections > before
                trouble = "the connection ended" if has_ended else f"no connection within {CONNECT_LIMIT_S:g} s"
            except Exception as error:  # noqa: BLE001 - a server may fail in any way, and is tried again
                trouble = _say(error)
            self._trouble = f"{trouble}; its last output: {words}" if (words := self._stderr.last_words) else trouble
            if self._connections > before:
                failures = 0
            elif was_left:
                logger.error("MCP server %s: it is ended and started again: %s", self._server.name, self._trouble)
                continue
            else:
                self._settled.set()  # waiting callers get the trouble
            failures += 1
            pause_s = RECONNECTS.after(failures)
            logger.error("MCP server %s: %s; trying again in %g s", self._server.name, self._trouble, pause_s)
            await anyio.sleep(pause_s)
            if self._settled.is_set():
                self._settled = anyio.Event()

    async def _connected(self) -> "Client":
        """Return the client once the present try to connect has succeeded; the caller bounds the wait.

        A server that died while idle is noticed before a call is sent, so that no call is lost with it.
        """
        while True:
            settled = self._settled
            await settled.wait()
            client = self._client
            if client is not None:
                async with self._asking:  # one caller asks whether it is alive; others wait for it
                    is_idle = not self._calls and anyio.current_time() - self._heard_at > PING_AFTER_S
                    if client is self._client and is_idle:
                        if await _is_alive(client):
                            self._heard_at = anyio.current_time()
                        else:
                            self._break()
                if client is self._client:
                    return client
            elif settled is self._settled:  # another call may have found a later connection broken meanwhile
                raise ToolRunFailed(f"the MCP server {self._server.name} is not connected: {self._trouble}")

    def _take(self, listed: tuple[ListedTool, ...]) -> None:
        self.listed, self._names = listed, frozenset(tool.name for tool in listed)
        self._list_due_at = anyio.current_time() + LISTING_S

    def _break(self) -> None:
        if self._client is not None:
            self._client, self._settled = None, anyio.Event()
        self._broken.set()

    async def _stay_connected(self) -> None:
        """Connect within the limit, and return when the connection is broken."""
        left, self._left = self._left, None
        with anyio.CancelScope(deadline=anyio.current_time() + CONNECT_LIMIT_S) as limit:
            try:
                async with AsyncExitStack() as stack:
                    client = await stack.enter_async_context(await self._connect(stack, left))
                    listed = await _all_tools(client) if left is None else _go_on(client, left)
                    limit.deadline = math.inf  # it bounds the connecting; the caller bounds a call
                    self._client, self._broken = client, anyio.Event()
                    self._take(listed)
                    # A server taken over must answer a ping before any other request.
                    self._heard_at = anyio.current_time() if left is None else -math.inf
                    self._connections += 1
                    goes_on = "" if left is None else f", going on with process {left.link.pid}"
                    logger.info("MCP server %s: %d tools%s", self._server.name, len(listed), goes_on)
                    self._settled.set()
                    await self._broken.wait()
            finally:
                self._break()
                self._link = None

    async def _connect(self, stack: AsyncExitStack, left: HeldServer | None) -> "Client":
        from mcp import Client  # noqa: PLC0415 - see above
        from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415
        from mcp.types import Implementation  # noqa: PLC0415
        from mcp.types.version import LATEST_MODERN_VERSION  # noqa: PLC0415

        from workers.tools.mcp_http import open_client  # noqa: PLC0415 - both need the SDK
        from workers.tools.stdio import StdioLink  # noqa: PLC0415 - as well

        who = Implementation(name="roundhouse", version=own_version())
        name = self._server.name
        if self._server.url is not None:
            http = await stack.enter_async_context(open_client(self._server.headers))
            streams = streamable_http_client(self._server.url, http_client=http, max_sse_event_size=MAX_RESULT_BYTES)
            return Client(streams, client_info=who, cache=None)
        if left is not None:
            self._link = StdioLink.adopt(name, left.link, self._stderr)
            # With a fixed version nothing is sent; ``_go_on`` restores the negotiated session.
            return Client(self._link.open(), client_info=who, cache=None, mode=LATEST_MODERN_VERSION)
        env = {**self._environment, **self._server.env}
        self._link = StdioLink.start(name, self._server.command, env, self._stderr)
        return Client(self._link.open(), client_info=who, cache=None)


def _go_on(client: "Client", left: HeldServer) -> tuple[ListedTool, ...]:
    """Restore the session that an earlier program negotiated, without a message to the server; return its tools.

    Raises:
        ValueError: the session cannot be read, or has a version that this SDK does not speak.
    """
    from mcp.types import DiscoverResult, InitializeResult  # noqa: PLC0415 - see above
    from mcp.types.version import HANDSHAKE_PROTOCOL_VERSIONS  # noqa: PLC0415

    negotiated: DiscoverResult | InitializeResult
    if left.is_discovered:
        negotiated = DiscoverResult.model_validate_json(left.negotiated, by_name=False)
    else:
        negotiated = InitializeResult.model_validate_json(left.negotiated, by_name=False)
        if negotiated.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
            raise ValueError(f"the session is of version {negotiated.protocol_version}")
    client.session.adopt(negotiated)
    return tuple(
        ListedTool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in left.tools
    )


async def _is_alive(client: "Client") -> bool:
    from mcp.shared.exceptions import MCPError  # noqa: PLC0415 - see above
    from mcp.types import METHOD_NOT_FOUND  # noqa: PLC0415

    with anyio.move_on_after(PING_LIMIT_S):
        try:
            await client.session.send_ping()  # the client's own call reports itself deprecated if this is refused
        except MCPError as error:
            return error.error.code == METHOD_NOT_FOUND  # an answer like any other
        except Exception:  # noqa: BLE001 - a transport may fail in any way
            return False
        return True
    return False


async def _all_tools(client: "Client") -> tuple[ListedTool, ...]:
    tools: list[ListedTool] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            ListedTool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"it lists more than {MOST_TOOLS} tools")
        if cursor is None:
            return tuple(tools)
    raise ValueError(f"its list of tools has more than {MOST_PAGES} pages")


async def _listing(client: "Client") -> tuple[ListedTool, ...] | None:
    """Return the tools of a server; None if it does not list them, and the next call finds out why."""
    try:
        return await _all_tools(client)
    except Exception:  # noqa: BLE001 - a transport may fail in any way
        return None


def _meta(use: ToolUse) -> "RequestParamsMeta | None":
    return None if use.key is None else cast("RequestParamsMeta", {"roundhouse/idempotency-key": use.key})


def _plain(result: "CallToolResult") -> object:
    texts = [block.text for block in result.content if block.type == "text"]
    if result.is_error:
        return {"error": "\n".join(texts) or "the tool reports an error without a text"}
    if result.structured_content is not None:
        return result.structured_content
    others = [block.model_dump(mode="json") for block in result.content if block.type != "text"]
    if others:
        return {"text": "\n".join(texts), "content": others}
    try:
        return json.loads("\n".join(texts))
    except ValueError:
        return "\n".join(texts)


def _say(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
