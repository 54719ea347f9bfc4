"""The tool runners that the configuration names, open for as long as the node runs."""

import importlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import anyio

from service.config.schema import Config, ToolsConfig
from service.errors import ConfigError
from workers.spec import WorkerSpec
from workers.tools.http import http_tools
from workers.tools.mcp import McpServer, McpTools
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


@asynccontextmanager
async def open_tools(config: Config, specs: Sequence[WorkerSpec]) -> AsyncIterator[list[WorkerSpec]]:
    """Connect to every tool server for a block; return the specifications with all that runs their tools.

    A server that is not there is tried again, and keeps nothing from starting.
    """
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        runners: dict[str, ToolRunner] = {}
        connections: list[McpTools] = []
        for name, model in config.models.items():
            mcp = _mcp(model.tools)
            connections += mcp
            http = model.tools.http
            known: list[ToolRunner] = [spec.tool_runner for spec in specs if spec.name == name and spec.tool_runner][:1]
            if http is not None:
                known.append(await stack.enter_async_context(http_tools(str(http.url), http.headers)))
            known += mcp
            if known:
                runners[name] = ToolRunners(known)
        for connection in connections:
            tasks.start_soon(connection.run_connection)
        yield [replace(spec, tool_runner=runners.get(spec.name)) for spec in specs]
        tasks.cancel_scope.cancel()


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
