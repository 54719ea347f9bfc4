"""The tool runners that the configuration names, open for as long as the node runs."""

import importlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import cast

import anyio

from service.config.schema import Config, ToolsConfig
from service.errors import ConfigError
from workers.spec import WorkerSpec
from workers.tools.http import http_tools
from workers.tools.mcp import McpServer, McpState, McpTools
from workers.tools.runner import PythonTools, ToolRunner, ToolRunners


def python_tools(model: str, places: Mapping[str, str], base: Path) -> PythonTools | None:
    """Return the Python callables of a model, by the names of tools; None where there are none.

    Modules are looked for in ``base``, the configuration's folder, too.

    Raises:
        ConfigError: one is not there, or cannot be called.
    """
    if not places:
        return None
    if str(base.resolve()) not in sys.path:
        sys.path.append(str(base.resolve()))
    return PythonTools({tool: _load(f"models.{model}.tools.python.{tool}", place) for tool, place in places.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """The specifications with all that runs their tools, and the MCP servers of each model."""

    specs: list[WorkerSpec]
    servers: Mapping[str, Sequence[McpTools]]
    python: Mapping[str, PythonTools]

    def states(self) -> list[tuple[str, McpState]]:
        """List the servers with their models, as they stand now."""
        return [(model, server.state) for model, servers in self.servers.items() for server in servers]


@asynccontextmanager
async def open_tools(config: Config, specs: Sequence[WorkerSpec]) -> AsyncIterator[Equipment]:
    """Connect to every tool server for a block.

    A server that is not there is tried again, and keeps nothing from starting.
    """
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        runners: dict[str, ToolRunner] = {}
        servers: dict[str, list[McpTools]] = {}
        python: dict[str, PythonTools] = {}
        for name, model in config.models.items():
            mcp = servers[name] = _mcp(model.tools)
            http = model.tools.http
            known: list[ToolRunner] = [spec.tool_runner for spec in specs if spec.name == name and spec.tool_runner][:1]
            if known and isinstance(known[0], PythonTools):
                python[name] = known[0]
            if http is not None:
                known.append(await stack.enter_async_context(http_tools(str(http.url), http.headers)))
            known += mcp
            if known:
                runners[name] = ToolRunners(known, {server.state.name: server for server in mcp})
        for connection in chain.from_iterable(servers.values()):
            tasks.start_soon(connection.run_connection)
        equipped = [replace(spec, tool_runner=runners.get(spec.name)) for spec in specs]
        yield Equipment(specs=equipped, servers=servers, python=python)
        tasks.cancel_scope.cancel()


def check_programs(config: Config) -> None:
    """Return if the program of every MCP server is there.

    Raises:
        ConfigError: one is not.
    """
    for model, settings in config.models.items():
        for name, server in settings.tools.mcp.items():
            if server.command and shutil.which(server.command[0], path=server.env.get("PATH")) is None:
                raise ConfigError(
                    f"models.{model}.tools.mcp.{name}.command: no such program: {server.command[0]!r}; give its path"
                )


def _mcp(tools: ToolsConfig) -> list[McpTools]:
    return [
        McpTools(
            McpServer(
                name=name,
                command=tuple(server.command),
                env=server.env,
                url=None if server.url is None else str(server.url),
                headers=server.headers,
            ),
            {key: value for key, value in os.environ.items() if not key.startswith("ROUNDHOUSE_")},
        )
        for name, server in tools.mcp.items()
    ]


def _load(key: str, place: str) -> Callable[..., object]:
    module_name, _, path = place.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(f"{key}: cannot load {place}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {place} cannot be called")
    return cast("Callable[..., object]", found)
