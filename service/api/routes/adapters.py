"""The HTTP API of a model's tools and LoRA adapters; adapters come and go as models with their own names."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from roundhouse_client.values.models import Adapter, Adapters, McpServer, Tool, Tools
from service.api.body import body_of, read_document
from service.api.errors.problems import refused
from service.config.model import ModelName
from service.config.source import outside_with_files
from service.conversations.document.limits import Limits
from service.errors import AdapterInvalid, Fault, ModelNotFound
from service.formats.faults import StrictModel, faults_of
from service.node.node import Node
from service.node.tool_catalog import ToolCatalog
from workers.adapters.model_adapters import ModelAdapters


def tools_router(catalog: ToolCatalog) -> APIRouter:
    """Return the route of tools."""
    router = APIRouter(prefix="/v1/models/{model:path}/tools", tags=["tools"])

    @router.get("", summary="List the tools of a model", responses=refused(401, 404))
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


class AdapterSpec(StrictModel):
    """An adapter that the engines' machine can read: a folder in PEFT's form for vLLM, a GGUF file for llama.cpp."""

    name: ModelName
    path: Path


ADAPTER_BODIES: Final = (AdapterSpec,)


def adapters_router(node: Node, limits: Limits, roots: Sequence[Path]) -> APIRouter:
    """Return the routes of adapters."""
    router = APIRouter(prefix="/v1/models/{model:path}/adapters", tags=["adapters"])
    adapters = node.adapters

    @router.get("", summary="List the adapters of a model", responses=refused(401, 404))
    async def look(model: str) -> Adapters:
        return _adapters(adapters.of_model(model))

    @router.post(
        "",
        status_code=201,
        summary="Load an adapter into a model's engines",
        description="Answered when agents may name it: 201, or 200 if it was loaded before.",
        responses={200: {"model": Adapter}, **refused(400, 401, 404, 409, 413, 422, 502, 503)},
        openapi_extra=body_of(AdapterSpec),
    )
    async def load(model: str, request: Request, response: Response) -> Adapter:
        changing = adapters.of_model(model)
        document = await read_document(request, limits)
        try:
            spec = AdapterSpec.model_validate(document)
        except ValidationError as error:
            raise AdapterInvalid(faults_of(error, AdapterSpec)) from error
        fault = outside_with_files(roots, spec.path)
        if fault is not None:
            raise AdapterInvalid([Fault(path="path", message=fault)])
        is_new = await adapters.load(model, spec.name, spec.path)
        response.status_code = 201 if is_new else 200
        return _loaded(changing, spec.name)

    @router.delete(
        "/{name:path}",
        status_code=204,
        summary="Unload an adapter that no unfinished job uses",
        responses=refused(401, 404, 409, 502, 503),
    )
    async def unload(model: str, name: str) -> None:
        await adapters.unload(model, name, node.door, node.scheduler.view.users)

    return router


def _adapters(adapters: ModelAdapters) -> Adapters:
    configured = (
        Adapter(
            name=name,
            is_configured=True,
            source=path,
            digest=None,
            size=None,
            loaded_at=None,
            workers=_workers(adapters, name),
        )
        for name, path in adapters.configured.items()
    )
    return Adapters(
        model=adapters.name,
        room=adapters.spec.adapter_room,
        changing=adapters.changing,
        adapters=(*configured, *(_loaded(adapters, name) for name in adapters.loaded)),
    )


def _loaded(adapters: ModelAdapters, name: str) -> Adapter:
    known = adapters.loaded[name]
    return Adapter(
        name=name,
        is_configured=False,
        source=known.source,
        digest=known.digest,
        size=known.size,
        loaded_at=datetime.fromisoformat(known.loaded_at),
        workers=_workers(adapters, name),
    )


def _workers(adapters: ModelAdapters, name: str) -> tuple[str, ...]:
    there = (worker for worker in adapters.workers if worker.now.is_serving and name in worker.adapters.loaded)
    return tuple(worker.spec.id for worker in there)
