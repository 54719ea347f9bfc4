"""The tools of each model's runners, which jobs may name by server or by tool, without schemas."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import anyio
import msgspec
from pydantic import ConfigDict, create_model
from pydantic.errors import PydanticUserError

from service.conversations.document.spec import (
    AgentSpec,
    CastSpec,
    ConversationSpec,
    JobSpec,
    McpReference,
    PythonReference,
    agents_of,
    is_tool_reference,
    reference_of,
)
from service.errors import Fault, InvalidJob, ToolServerDown
from service.formats.faults import unknown
from workers.tools.mcp import McpState, McpTools
from workers.tools.runner import KEY_PARAMETER, PythonTools

SETTLE_S: Final = 5.0  # seconds that a job waits for the first connection to a server
Document = Mapping[str, Any]
A = TypeVar("A", AgentSpec, CastSpec)
T = TypeVar("T")


class CatalogTool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool: its OpenAI definition, and its MCP server; None for a Python callable."""

    definition: Document
    server: str | None

    @property
    def name(self) -> str:
        """The tool's name on its server."""
        return str(self.definition["function"]["name"])


class ToolRunnersOfModel(msgspec.Struct, frozen=True, kw_only=True):
    """The runners of one model's tools."""

    python: PythonTools | None
    servers: Sequence[McpTools]


class ToolCatalog:
    """The tools of all models here; ``adapters`` returns the names of adapters with their base models."""

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
        """The models with known tools."""
        return tuple(self._models)

    async def list_again(self, model: str) -> None:
        """List the tools of a model's servers again, each within its time limit."""
        async with anyio.create_task_group() as tasks:
            for server in self._servers(model):
                tasks.start_soon(server.list_again)

    def tools(self, model: str) -> list[CatalogTool]:
        """List the tools of a model: Python callables first, then those that each server listed last."""
        return [*self._callables.get(model, ()), *(tool for server in self._servers(model) for tool in _listed(server))]

    def states(self, model: str) -> list[McpState]:
        """List the states of a model's MCP servers."""
        return [server.state for server in self._servers(model)]

    def _servers(self, model: str) -> Sequence[McpTools]:
        return self._models[model].servers if model in self._models else ()

    async def wait_settled(self) -> None:
        """Return when every server has listed its tools or failed its first connection."""
        for runners in self._models.values():
            for server in runners.servers:
                await server.wait_settled()

    async def expand(self, spec: JobSpec) -> JobSpec:
        """Return a job with definitions instead of references to servers and callables.

        Raises:
            InvalidJob: with the place of each unknown name.
            ToolServerDown: a server has not listed its tools yet.
        """
        if not any(_has_references(agent.tools) for _, agent in agents_of(spec)):
            return spec
        faults: list[Fault] = []
        agents = [
            await self._expand_agent(agent, agent, f"agents[{place}]", faults)
            for place, agent in enumerate(spec.agents)
        ]
        known = {agent.id: agent for agent in spec.agents}
        conversations = [
            await self._expand_cast(conversation, known, f"conversations[{place}].agents", faults)
            for place, conversation in enumerate(spec.conversations)
        ]
        if faults:
            raise InvalidJob(faults)
        return spec.model_copy(update={"agents": agents, "conversations": conversations})

    async def _expand_cast(
        self, conversation: ConversationSpec, agents: Mapping[str, AgentSpec], place: str, faults: list[Fault]
    ) -> ConversationSpec:
        """Write out the tools of agents in one conversation; with another model also those given in the job."""
        written: dict[str, CastSpec] = {}
        for name, given in conversation.agents.items():
            if {"model", "tools"} & given.model_fields_set:
                whole = given.applied_to(agents[name]) if name in agents else given
                written[name] = await self._expand_agent(given, whole, f"{place}.{name}", faults)
        return (
            conversation.model_copy(update={"agents": {**conversation.agents, **written}}) if written else conversation
        )

    async def _expand_agent(self, given: A, whole: AgentSpec | CastSpec, place: str, faults: list[Fault]) -> A:
        """Write the tools of the ``whole`` agent into its ``given`` part, if any of them is a reference."""
        if not _has_references(whole.tools):
            return given
        model = self._adapters().get(whole.model, whole.model)
        tools: list[object] = []
        for position, entry in enumerate(whole.tools):
            reference = reference_of(entry) if is_tool_reference(entry) else None
            if reference is None:
                tools.append(entry)
            else:
                tools += await self._referred(reference, model, f"{place}.tools[{position}]", faults)
        return given.model_copy(update={"tools": _distinct(tools)})

    async def _referred(
        self, reference: McpReference | PythonReference, model: str, place: str, faults: list[Fault]
    ) -> list[Document]:
        if isinstance(reference, PythonReference):
            known = {tool.name: tool.definition for tool in self._callables.get(model, ())}
            return _picked("Python tool", {f"{place}.python": reference.python}, known, faults)
        servers = {server.state.name: server for server in self._servers(model)}
        tools: list[Document] = []
        for server in _picked("MCP server", {f"{place}.mcp": reference.mcp}, servers, faults):
            listed = {tool.name: tool.definition for tool in await _settled(server)}
            only = list(listed) if reference.only is None else reference.only
            named = {f"{place}.only[{number}]": name for number, name in enumerate(only)}
            tools += _picked(f"tool of {reference.mcp}", named, listed, faults)
        return tools


def _picked(kind: str, named: Mapping[str, str], known: Mapping[str, T], faults: list[Fault]) -> list[T]:
    """Return the named values that are known; add a fault for each unknown name."""
    faults += [
        Fault(path=place, message=unknown(kind, name, known)) for place, name in named.items() if name not in known
    ]
    return [known[name] for name in named.values() if name in known]


def _has_references(tools: Sequence[object]) -> bool:
    return any(map(is_tool_reference, tools))


async def _settled(server: McpTools) -> list[CatalogTool]:
    with anyio.move_on_after(SETTLE_S):
        await server.wait_settled()
    if server.listed is None:
        raise ToolServerDown(server.state.name, server.state.trouble or "it has not listed its tools yet")
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
    """Return each tool once, under distinct names: a name of two tools gets their server's as prefix."""
    tools = [tool for place, tool in enumerate(tools) if not _is_of_server(tool) or tool not in tools[:place]]
    names = Counter(_name_of(tool) for tool in tools)
    return [_prefixed(tool) if names[_name_of(tool)] > 1 else tool for tool in tools]


def _prefixed(tool: Any) -> object:  # noqa: ANN401 - a definition, or anything else that an author posted
    if not _is_of_server(tool):
        return tool
    function, server = tool["function"], tool["mcp"]["server"]
    return {**tool, "function": {**function, "name": f"{server}_{function['name']}"}}


def _is_of_server(tool: object) -> bool:
    return isinstance(tool, dict) and "mcp" in tool


def _name_of(tool: Any) -> object:  # noqa: ANN401 - a definition, or anything else that an author posted
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else id(tool)


def callable_tool(name: str, function: Callable[..., object]) -> CatalogTool:
    """Return the definition of a Python callable, from its annotations and the first paragraph of its docstring."""
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
    except (TypeError, ValueError, NameError, PydanticUserError):  # a builtin, or types without a JSON form
        return {"type": "object"}
    return {key: value for key, value in schema.items() if key != "title"}


def _fields(signature: inspect.Signature) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, parameter in signature.parameters.items():
        if name == KEY_PARAMETER or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        yield name, (kind, ... if parameter.default is parameter.empty else parameter.default)
