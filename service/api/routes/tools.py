"""The HTTP surface of a model's tools: what agents may ask for, and which servers are down."""

from fastapi import APIRouter

from roundhouse_client.values.models import McpServer, Tool, Tools
from service.api.errors.problems import refused
from service.errors import ModelNotFound
from service.node.tool_catalog import ToolCatalog


def tools_router(catalog: ToolCatalog) -> APIRouter:
    """Return the route of tools."""
    router = APIRouter(prefix="/v1/models/{model:path}/tools", tags=["tools"])

    @router.get("", summary="The tools of a model", responses=refused(401, 404))
    async def look(model: str) -> Tools:
        if model not in catalog.models:
            raise ModelNotFound(model, catalog.models, catalog.models, "of this node")
        await catalog.list_again(model)
        return Tools(
            model=model,
            tools=tuple(
                Tool(
                    name=tool.name,
                    description=tool.definition["function"]["description"],
                    parameters=tool.definition["function"]["parameters"],
                    server=tool.server,
                )
                for tool in catalog.tools(model)
            ),
            servers=tuple(
                McpServer(name=state.name, tools=state.tools, trouble=state.trouble) for state in catalog.states(model)
            ),
        )

    return router
