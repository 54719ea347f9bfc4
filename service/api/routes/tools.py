"""The HTTP surface of a model's tools: what agents may ask for, and which servers are down."""

from typing import Any

from fastapi import APIRouter

from service.api.errors.problems import refused
from service.api.schemas import Body
from service.errors import ModelNotFound
from service.node.tool_catalog import ToolCatalog


class ToolOut(Body):
    """One tool; ``server`` is the MCP server that lists it, null where it is a Python callable."""

    name: str
    description: str
    parameters: dict[str, Any]
    server: str | None


class ServerOut(Body):
    """An MCP server of the model; ``trouble`` is why it is not connected, ``tools`` how many it listed last."""

    name: str
    tools: int | None
    trouble: str | None


class ToolsOut(Body):
    """A model's tools by name, and the servers that they are from."""

    model: str
    tools: list[ToolOut]
    servers: list[ServerOut]


def tools_router(catalog: ToolCatalog) -> APIRouter:
    """Return the route of tools."""
    router = APIRouter(prefix="/v1/models/{model:path}/tools", tags=["tools"])

    @router.get("", summary="The tools of a model", responses=refused(401, 404))
    async def look(model: str) -> ToolsOut:
        if model not in catalog.models:
            raise ModelNotFound(model, catalog.models, catalog.models, "of this node")
        await catalog.list_again(model)
        tools = [
            ToolOut(
                name=tool.name,
                description=tool.definition["function"]["description"],
                parameters=tool.definition["function"]["parameters"],
                server=tool.server,
            )
            for tool in catalog.tools(model)
        ]
        servers = [
            ServerOut(name=state.name, tools=state.tools, trouble=state.trouble) for state in catalog.states(model)
        ]
        return ToolsOut(model=model, tools=tools, servers=servers)

    return router
