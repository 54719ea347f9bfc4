"""The configured tool runners, kept open while they are configured."""

import importlib
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import anyio
from anyio.abc import TaskGroup

from service.config.model import McpServerConfig, ToolsConfig
from service.config.schema import Config
from service.config.secrets import child_environment
from service.errors import ConfigError
from workers.process.handed_over import HeldServer
from workers.process.identity import ProcessId
from workers.spec import WorkerSpec
from workers.tools.http import HttpTools, open_http_tools
from workers.tools.mcp import McpServer, McpState, McpTools
from workers.tools.runner import PythonTools, SwitchedTools, ToolRunners

WaitGone = Callable[[str], Coroutine[object, object, None]]
LET_GO_S: Final = 5.0  # time beyond a call's own limit before its server is closed
NOT_WANTED: Final = "it is no longer in the configuration"
logger = logging.getLogger(__name__)


def python_tools(model: str, places: Mapping[str, str], base: Path) -> PythonTools | None:
    """Return the Python callables of a model, by tool name; None if it has none.

    Modules are also searched for in ``base``, the configuration's folder.

    Raises:
        ConfigError: one is not there, or cannot be called.
    """
    if not places:
        return None
    _search_in(base)
    return PythonTools({tool: _load(f"models.{model}.tools.python.{tool}", place) for tool, place in places.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """One MCP server of one model; its connection is held until ``scope`` is cancelled."""

    config: McpServerConfig
    tools: McpTools
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def run(self) -> None:
        with self.scope:
            await self.tools.run_connection()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolsOfModel:
    """The present runners of one model's tools."""

    config: ToolsConfig
    timeout_s: float
    switched: SwitchedTools
    python: PythonTools | None = None
    http: HttpTools | None = None
    servers: Mapping[str, _Server] = field(default_factory=dict)

    def runners(self) -> ToolRunners | None:
        servers = {name: server.tools for name, server in self.servers.items()}
        known = [each for each in (self.python, self.http, *servers.values()) if each is not None]
        return ToolRunners(known, servers) if known else None


def _no_tools(switched: SwitchedTools) -> _ToolsOfModel:
    return _ToolsOfModel(config=ToolsConfig(), timeout_s=0.0, switched=switched)


class Equipment:
    """All tool runners, by model; ``tasks`` holds the connections, programs get ``environment`` beside their own.

    ``left`` are MCP servers that an earlier program of this process left running: the first configuration adopts those
    that it would start in the same way. ``adopted`` has their processes by MODEL/SERVER, ``ended`` why others ended.
    """

    def __init__(self, tasks: TaskGroup, environment: Mapping[str, str], left: Sequence[HeldServer] = ()) -> None:
        self._tasks = tasks
        self._environment = environment
        self._models: dict[str, _ToolsOfModel] = {}
        self._left = {(each.model, each.name): each for each in left}
        self.adopted: dict[str, ProcessId] = {}
        self.ended: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Equipment {list(self._models)}>"

    @property
    def servers(self) -> Mapping[str, Sequence[McpTools]]:
        """The MCP servers of each model."""
        return {model: [each.tools for each in tools.servers.values()] for model, tools in self._models.items()}

    @property
    def python(self) -> Mapping[str, PythonTools]:
        """The Python tools of each model that has any."""
        return {model: tools.python for model, tools in self._models.items() if tools.python is not None}

    def states(self) -> list[tuple[str, McpState]]:
        """List the servers with their models and present states."""
        return [(model, server.state) for model, servers in self.servers.items() for server in servers]

    def hand_over_servers(self) -> list[HeldServer]:
        """Return the MCP servers over stdio in a form that the next program of this process can adopt."""
        found = (server.hand_over_server(model) for model, servers in self.servers.items() for server in servers)
        return [each for each in found if each is not None]

    def equipped(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Return specifications with their models' tool runners."""
        return [replace(spec, tool_runner=self._models[spec.name].switched) for spec in specs]

    def change(self, config: Config, specs: Sequence[WorkerSpec], wait_gone: WaitGone) -> None:
        """Use a configuration's tools from now on. Running calls go on; unchanged servers stay connected.

        A missing server is tried again, and delays no start. ``wait_gone`` returns when a removed model's last worker
        has gone: until then its turns may call its tools.
        """
        callables = {spec.name: spec.tool_runner for spec in specs}
        before, self._models = self._models, {}
        for name, model in config.models.items():
            python, old = callables.get(name), before.pop(name, None) or _no_tools(SwitchedTools())
            self._models[name] = self._tools_of(
                name, model.tools, old, python if isinstance(python, PythonTools) else None
            )
        for unwanted in self._left.values():
            self._end(unwanted, NOT_WANTED)
        self._left.clear()
        for name, left in before.items():
            self._tasks.start_soon(self._retire, left, wait_gone(name))

    async def _retire(self, left: _ToolsOfModel, gone: Awaitable[None]) -> None:
        await gone
        self._switch(left, _no_tools(left.switched))

    def _tools_of(
        self, model: str, config: ToolsConfig, old: _ToolsOfModel, python: PythonTools | None
    ) -> _ToolsOfModel:
        if old.config.python == config.python:
            python = old.python
        http = old.http
        if old.config.http != config.http:
            http = None if config.http is None else open_http_tools(str(config.http.url), config.http.headers)
        new = _ToolsOfModel(
            config=config,
            timeout_s=config.timeout_s,
            switched=old.switched,
            python=python,
            http=http,
            servers={name: self._server(model, name, each, old) for name, each in config.mcp.items()},
        )
        self._switch(old, new)
        return new

    def _server(self, model: str, name: str, config: McpServerConfig, old: _ToolsOfModel) -> _Server:
        known = old.servers.get(name)
        if known is not None and known.config == config:
            return known
        wanted = _mcp(name, config)
        tools = McpTools(wanted, self._environment, self._adopted(model, wanted))
        server = _Server(config=config, tools=tools)
        self._tasks.start_soon(server.run)
        return server

    def _adopted(self, model: str, wanted: McpServer) -> HeldServer | None:
        """Return the server that an earlier program left running; None if this program has to start it."""
        held = self._left.pop((model, wanted.name), None)
        if held is None:
            return None
        if (fault := held.fault(wanted.launch)) is not None:
            self._end(held, fault)
            return None
        self.adopted[_place(held)] = held.link.identity
        return held

    def _end(self, held: HeldServer, why: str) -> None:
        logger.info("MCP server %s of %s is ended: %s", held.name, held.model, why)
        self.ended[_place(held)] = why
        held.let_go()

    def _switch(self, old: _ToolsOfModel, new: _ToolsOfModel) -> None:
        if (old.python, old.http, old.servers) == (new.python, new.http, new.servers):
            return
        runners = new.switched.current
        new.switched.switch(new.runners())
        if runners is None:
            return
        servers = [each for name, each in old.servers.items() if new.servers.get(name) is not each]
        http = old.http if old.http is not new.http else None
        self._tasks.start_soon(self._let_go, old, runners, servers, http)

    async def _let_go(
        self, old: _ToolsOfModel, runners: ToolRunners, servers: Sequence[_Server], http: HttpTools | None
    ) -> None:
        """Close what no call needs any more; a call takes at most ``tools.timeout_s``."""
        with anyio.move_on_after(old.timeout_s + LET_GO_S):
            await old.switched.wait_unused(runners)
        for server in servers:
            server.scope.cancel()
        if http is not None:
            await http.close()

    async def close(self) -> None:
        """Close the connections to HTTP endpoints."""
        for tools in self._models.values():
            if tools.http is not None:
                await tools.http.close()


@asynccontextmanager
async def open_tools(
    config: Config,
    specs: Sequence[WorkerSpec],
    left: Sequence[HeldServer] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Equipment]:
    """Connect to every tool server for a block; ``left`` are servers that an earlier program of this process left."""
    async with anyio.create_task_group() as tasks:
        equipment = Equipment(tasks, child_environment(()) if environment is None else environment, left)
        equipment.change(config, specs, _nobody)
        try:
            yield equipment
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await equipment.close()


async def _nobody(_model: str) -> None:
    """Return at once: there were no workers before."""


def check_rewards(config: Config, base: Path) -> None:
    """Check that the callables which give rewards can be loaded; modules are also searched for in ``base``.

    Raises:
        ConfigError: one cannot.
    """
    _search_in(base if config.rollouts.rewards else None)
    for place, name in enumerate(config.rollouts.rewards):
        _load(f"rollouts.rewards[{place}]", name)


def check_programs(config: Config) -> None:
    """Check that the program of every MCP server is there.

    Raises:
        ConfigError: one is not.
    """
    for model, settings in config.models.items():
        for name, server in settings.tools.mcp.items():
            if server.command and shutil.which(server.command[0], path=server.env.get("PATH")) is None:
                raise ConfigError(
                    f"models.{model}.tools.mcp.{name}.command: no such program: {server.command[0]!r}; give its path"
                )


def _search_in(base: Path | None) -> None:
    if base is not None and str(base.resolve()) not in sys.path:
        sys.path.append(str(base.resolve()))


def _place(server: HeldServer) -> str:
    return f"{server.model}/{server.name}"


def _mcp(name: str, server: McpServerConfig) -> McpServer:
    return McpServer(
        name=name,
        command=tuple(server.command),
        env=server.env,
        url=None if server.url is None else str(server.url),
        headers=server.headers,
    )


def _load(key: str, place: str) -> Callable[..., object]:
    module_name, _, path = place.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(f"{key}: cannot load {place}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {place} is not callable")
    return cast("Callable[..., object]", found)
