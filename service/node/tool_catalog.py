"""The tools that a model's runners have, as jobs may ask for them: by server or by name, without their schemas."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import anyio
import msgspec
from pydantic import ConfigDict, create_model
from pydantic.errors import PydanticUserError

from service.conversations.limits import posted_agents
from service.conversations.spec import is_tool_reference, is_wellformed_reference
from service.errors import Fault, InvalidJob, ToolServerDown
from service.formats.faults import unknown
from workers.tools.mcp import McpState, McpTools
from workers.tools.runner import KEY_PARAMETER, PythonTools

SETTLE_S: Final = 5.0  # how long a job waits for a server that is being connected to for the first time
Document = Mapping[str, Any]


class CatalogTool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool: its OpenAI definition, and the MCP server that has it, None where it is a Python callable."""

    definition: Document
    server: str | None

    @property
    def name(self) -> str:
        """The server's name for it."""
        return str(self.definition["function"]["name"])


class ToolRunnersOfModel(msgspec.Struct, frozen=True, kw_only=True):
    """The runners of one model's tools."""

    python: PythonTools | None
    servers: Sequence[McpTools]


class ToolCatalog:
    """The tools of all models here; ``adapters`` gives the names of adapters, each with its model."""

    def __init__(self, models: Mapping[str, ToolRunnersOfModel], adapters: Callable[[], Mapping[str, str]]) -> None:
        self._adapters = adapters
        self.change(models)

    def __repr__(self) -> str:
        return f"<ToolCatalog {sorted(self._models)}>"

    def change(self, models: Mapping[str, ToolRunnersOfModel]) -> None:
        """List the tools of other runners from now on."""
        self._models = models
        self._callables = {
            model: [callable_tool(name, call) for name, call in runners.python.callables.items()]
            for model, runners in models.items()
            if runners.python is not None
        }

    @property
    def models(self) -> Sequence[str]:
        """The models whose tools are known here."""
        return tuple(self._models)

    async def list_again(self, model: str) -> None:
        """List the tools of each of a model's servers again, each within its limit."""
        async with anyio.create_task_group() as tasks:
            for server in self._servers(model):
                tasks.start_soon(server.list_again)

    def tools(self, model: str) -> list[CatalogTool]:
        """List the tools of a model, Python callables first, then each server's, as it listed them last."""
        return [*self._callables.get(model, ()), *(tool for server in self._servers(model) for tool in _listed(server))]

    def states(self, model: str) -> list[McpState]:
        """List the MCP servers of a model as they stand."""
        return [server.state for server in self._servers(model)]

    def _servers(self, model: str) -> Sequence[McpTools]:
        return self._models[model].servers if model in self._models else ()

    async def wait_settled(self) -> None:
        """Return when every server has told its tools, or its first connection has failed."""
        for runners in self._models.values():
            for server in runners.servers:
                await server.wait_settled()

    async def expand(self, document: object) -> object:
        """Return a job with its tools written out: those that agents have named by server, or by callable.

        Raises:
            InvalidJob: a name is not there; with the place of each.
            ToolServerDown: a server has not told its tools yet.
        """
        if not isinstance(document, dict) or not any(_has_references(each) for _, each in posted_agents(document)):
            return document
        faults: list[Fault] = []
        written = dict(document)
        agents, conversations = document.get("agents"), document.get("conversations")
        if isinstance(agents, list):
            written["agents"] = [
                await self._expand_agent(agent, f"agents[{place}]", faults) if _has_references(agent) else agent
                for place, agent in enumerate(agents)
            ]
        if isinstance(conversations, list):
            known = {str(agent.get("id")): agent for agent in agents or () if isinstance(agent, dict)}
            written["conversations"] = [
                await self._expand_cast(conversation, known, f"conversations[{place}].agents", faults)
                for place, conversation in enumerate(conversations)
            ]
        if faults:
            raise InvalidJob(faults)
        return written

    async def _expand_cast(
        self, conversation: object, agents: Mapping[str, dict[str, Any]], place: str, faults: list[Fault]
    ) -> object:
        """Write out what agents of one conversation name; with another model, the job's names anew."""
        cast = conversation.get("agents") if isinstance(conversation, dict) else None
        if not isinstance(conversation, dict) or not isinstance(cast, dict):
            return conversation
        written = dict(cast)
        for name, given in cast.items():
            whole = {**agents.get(name, {}), **given} if isinstance(given, dict) else {}
            if _has_references(whole) and {"model", "tools"} & given.keys():
                expanded = await self._expand_agent(whole, f"{place}.{name}", faults)
                written[name] = {**given, "tools": expanded["tools"]}
        return {**conversation, "agents": written}

    async def _expand_agent(self, agent: dict[str, Any], place: str, faults: list[Fault]) -> dict[str, Any]:
        model = str(agent.get("model"))
        model = self._adapters().get(model, model)
        tools: list[object] = []
        for position, entry in enumerate(agent["tools"]):
            if is_tool_reference(entry) and is_wellformed_reference(entry):
                tools += await self._referred(entry, model, f"{place}.tools[{position}]", faults)
            else:
                tools.append(entry)
        return {**agent, "tools": _distinct(tools)}

    async def _referred(self, entry: Document, model: str, place: str, faults: list[Fault]) -> list[object]:
        if "python" in entry:
            known = {tool.name: tool.definition for tool in self._callables.get(model, ())}
            if entry["python"] not in known:
                faults.append(Fault(path=f"{place}.python", message=unknown("Python tool", entry["python"], known)))
            return [known[entry["python"]]] if entry["python"] in known else []
        servers = {server.state.name: server for server in self._servers(model)}
        server = servers.get(entry["mcp"])
        if server is None:
            faults.append(Fault(path=f"{place}.mcp", message=unknown("MCP server", entry["mcp"], servers)))
            return []
        listed = {tool.name: tool.definition for tool in await _settled(server)}
        only = entry.get("only")
        only = list(listed) if only is None else only
        for number, name in enumerate(only):
            if name not in listed:
                message = unknown(f"tool of {entry['mcp']}", name, listed)
                faults.append(Fault(path=f"{place}.only[{number}]", message=message))
        return [listed[name] for name in only if name in listed]


def _has_references(agent: object) -> bool:
    tools = agent.get("tools") if isinstance(agent, dict) else None
    return isinstance(tools, list) and any(map(is_tool_reference, tools))


async def _settled(server: McpTools) -> list[CatalogTool]:
    with anyio.move_on_after(SETTLE_S):
        await server.wait_settled()
    if server.listed is None:
        raise ToolServerDown(server.state.name, server.state.trouble or "it has not told its tools yet")
    await server.list_again()
    return _listed(server)


def _listed(server: McpTools) -> list[CatalogTool]:
    name = server.state.name
    return [
        CatalogTool(
            server=name,
            definition={
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                "mcp": {"server": name, "tool": tool.name},
            },
        )
        for tool in server.listed or ()
    ]


def _distinct(tools: Sequence[object]) -> list[object]:
    """Return each tool once, under names that differ: one that stands twice is prefixed with its server's."""
    tools = [tool for place, tool in enumerate(tools) if not _is_of_server(tool) or tool not in tools[:place]]
    names = Counter(_name_of(tool) for tool in tools)
    return [_prefixed(tool) if names[_name_of(tool)] > 1 else tool for tool in tools]


def _prefixed(tool: Any) -> object:  # noqa: ANN401 - a definition, or whatever an author took for one
    if not _is_of_server(tool):
        return tool
    function, server = tool["function"], tool["mcp"]["server"]
    return {**tool, "function": {**function, "name": f"{server}_{function['name']}"}}


def _is_of_server(tool: object) -> bool:
    return isinstance(tool, dict) and "mcp" in tool


def _name_of(tool: Any) -> object:  # noqa: ANN401 - a definition, or whatever an author took for one
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else id(tool)


def callable_tool(name: str, function: Callable[..., object]) -> CatalogTool:
    """Return the definition of a Python callable: its parameters by their annotations, its docstring's first lines."""
    described = inspect.getdoc(function) or ""
    return CatalogTool(
        server=None,
        definition={
            "type": "function",
            "function": {
                "name": name,
                "description": described.partition("\n\n")[0],
                "parameters": _parameters(name, function),
            },
        },
    )


def _parameters(name: str, function: Callable[..., object]) -> dict[str, object]:
    try:
        fields: dict[str, Any] = dict(_fields(inspect.signature(function, eval_str=True)))
        model = create_model(name, __config__=ConfigDict(arbitrary_types_allowed=True, extra="forbid"), **fields)
        schema: dict[str, object] = model.model_json_schema()
    except (TypeError, ValueError, NameError, PydanticUserError):  # of a builtin, or of types that are no JSON
        return {"type": "object"}
    return {key: value for key, value in schema.items() if key != "title"}


def _fields(signature: inspect.Signature) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, parameter in signature.parameters.items():
        if name == KEY_PARAMETER or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        yield name, (kind, ... if parameter.default is parameter.empty else parameter.default)
