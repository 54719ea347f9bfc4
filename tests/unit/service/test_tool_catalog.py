"""Tools that jobs name without describing them."""

from collections.abc import Sequence
from typing import Any

import pytest

from service.conversations.document.job_faults import JobRules
from service.conversations.document.job_parser import parse_job
from service.conversations.document.limits import Limits
from service.conversations.document.spec import JobSpec
from service.conversations.job.job import JobId
from service.errors import InvalidJob, ToolServerDown
from service.node.tool_catalog import ToolCatalog, ToolRunnersOfModel, callable_tool
from workers.tools.mcp import ListedTool, McpServer, McpTools
from workers.tools.runner import PythonTools


def now(zone: str, offset: int = 0) -> str:
    """Give the time, with a long description."""
    return f"{zone} {offset}"


def bare(what, *rest, idempotency_key=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN002, ANN201, ARG001
    return what


class Server(McpTools):
    """A server that has listed its tools, or never will; its program is tested elsewhere."""

    def __init__(self, name: str, tools: Sequence[str] | None) -> None:
        super().__init__(McpServer(name=name), {})
        self._settled.set()
        if tools is not None:
            schema = {"type": "object", "properties": {"path": {"type": "string"}}}
            self.listed = tuple(ListedTool(name=tool, description=f"{tool}!", parameters=schema) for tool in tools)


def catalog(*servers: McpTools) -> ToolCatalog:
    runners = ToolRunnersOfModel(python=PythonTools({"now": now, "bare": bare}), servers=servers)
    return ToolCatalog({"m": runners}, lambda: {"adapter": "m"})


def job(*tools: object, model: str = "m") -> JobSpec:
    agents = [{"id": "a", "model": model, "tools": list(tools)}]
    return JobSpec.model_validate({"agents": agents, "conversations": [{"prompt": "Go."}]})


def tools_of(spec: JobSpec) -> list[Any]:
    return spec.agents[0].tools


def names(spec: JobSpec) -> list[str]:
    return [tool["function"]["name"] for tool in tools_of(spec)]


async def test_tools_of_a_server_are_written_out_with_their_schemas() -> None:
    """All of them, or a selection, for agents with an adapter too. A job keeps the tools it was posted with."""
    files = Server("files", ["read", "write"])
    for model in ("m", "adapter"):
        written = await catalog(files).expand(job({"mcp": "files"}, model=model))
        assert names(written) == ["read", "write"]
    written = await catalog(files).expand(job({"mcp": "files", "only": ["write"]}, {"python": "now"}))
    first, second = tools_of(written)
    assert first["function"] == {
        "name": "write",
        "description": "write!",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    assert first["mcp"] == {"server": "files", "tool": "write"}
    assert second["function"]["name"] == "now"


async def test_a_name_that_stands_twice_is_prefixed() -> None:
    """It still means the tool of its own server."""
    written = await catalog(Server("a", ["read"]), Server("b", ["read", "x"])).expand(job({"mcp": "a"}, {"mcp": "b"}))
    assert names(written) == ["a_read", "b_read", "x"]
    assert tools_of(written)[1]["mcp"] == {"server": "b", "tool": "read"}
    twice = await catalog(Server("a", ["read"])).expand(job({"mcp": "a"}, {"mcp": "a", "only": ["read"]}))
    assert names(twice) == ["read"], "the same tool is no other one"


async def test_missing_tools_are_reported_with_their_places() -> None:
    """The post reports all of them at once."""
    given = job({"mcp": "fils"}, {"mcp": "files", "only": ["raed"]}, {"python": "then"})
    with pytest.raises(InvalidJob) as refused:
        await catalog(Server("files", ["read"])).expand(given)
    assert [(fault.path, fault.message) for fault in refused.value.faults] == [
        ("agents[0].tools[0].mcp", "unknown MCP server 'fils'; did you mean 'files'?"),
        ("agents[0].tools[1].only[0]", "unknown tool of files 'raed'; did you mean 'read'?"),
        ("agents[0].tools[2].python", "unknown Python tool 'then'; known: now, bare"),
    ]


async def test_a_server_that_never_listed_its_tools_is_named() -> None:
    """Once it has listed them, the last list stands while it is down."""
    with pytest.raises(ToolServerDown, match="files"):
        await catalog(Server("files", None)).expand(job({"mcp": "files"}))


async def test_a_job_without_references_is_unchanged() -> None:
    """It stays the document that was posted; the parser refuses a malformed reference."""
    for spec in (job({"function": {"name": "f"}}), job({"mcp": 5})):
        assert await catalog().expand(spec) == spec


def test_a_callables_parameters_come_from_its_annotations() -> None:
    """The key that Roundhouse passes is left out; a parameter without annotation accepts anything."""
    function = callable_tool("now", now).definition["function"]
    assert function["description"] == "Give the time, with a long description."
    assert function["parameters"]["required"] == ["zone"]
    assert function["parameters"]["properties"]["zone"]["type"] == "string"
    assert function["parameters"]["properties"]["offset"]["default"] == 0
    bare_parameters = callable_tool("bare", bare).definition["function"]["parameters"]
    assert (list(bare_parameters["properties"]), bare_parameters["required"]) == (["what"], ["what"])
    assert callable_tool("print", max).definition["function"]["parameters"] == {"type": "object"}


def test_signals_are_written_in_full() -> None:
    """No runner has them; a reference to one has the form of a tool's."""
    rules = JobRules(models=["m"], limits=Limits(), webhook_hosts=[], webhook_secrets=[])
    for key, entry in (("exit_tools", {"mcp": "files"}), ("tools", {"mcp": 5}), ("tools", {"python": "f", "only": []})):
        document = {"agents": [{"id": "a", "model": "m", key: [entry]}], "conversations": [{"prompt": "Go."}]}
        with pytest.raises(InvalidJob) as refused:
            parse_job(document, JobId("j"), rules)
        assert [fault.path for fault in refused.value.faults] == [f"agents[0].{key}[0]"]
