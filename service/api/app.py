"""The whole HTTP API as one ASGI application."""

import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from roundhouse_client.values.jobs import BatchLine
from roundhouse_client.values.node import NodeResult
from roundhouse_client.values.rollout_rows import RolloutRow
from service import __version__
from service.api.body import BufferedBodies
from service.api.door.access import AccessCheck, Rates
from service.api.door.gate import Gate, Heads, KeyRing
from service.api.door.http_server import Measuring
from service.api.errors import problems
from service.api.errors.problems import Problem
from service.api.openai.model_names import model_router
from service.api.openai.routes import RelayedPaths, Relays, describe_relayed, openai_router
from service.api.routes.adapters import ADAPTER_BODIES, adapters_router, tools_router
from service.api.routes.callers_turns import CALLERS_BODIES, callers_turns_router
from service.api.routes.cluster import cluster_router
from service.api.routes.events import timeline_router
from service.api.routes.jobs import job_router, jobs_router
from service.api.routes.loading import loading_router
from service.api.routes.overview import overview_router, page_router, speaking_router
from service.api.routes.rollouts import ROLLOUT_BODIES, rollouts_router
from service.api.routes.sessions import SESSION_BODIES, sessions_router
from service.api.routes.status import configuration_router, metrics_router, status_router
from service.api.routes.upgrades import upgrade_router
from service.api.routes.usage import usage_router
from service.api.routes.weights import WEIGHTS_BODIES, weights_router
from service.api.routes.workers import health_router, lanes_router, workers_router
from service.config.schema import Config
from service.conversations.callers import Caller
from service.conversations.document.spec import JobSpec
from service.node.node import Node
from service.node.reloader import Reloader
from service.timeline.timeline import Timeline
from service.upgrade.upgrader import Upgrader


class Front:
    """Passes each request to the current application; a request stays with the one that it began with."""

    def __init__(self, current: ASGIApp) -> None:
        self.current = current

    def __repr__(self) -> str:
        return f"<Front of {self.current!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        await self.current(scope, receive, send)


def build_app(
    node: Node,
    config: Config,
    roots: Sequence[Path],
    callers: Mapping[bytes, Caller],
    reloader: Reloader,
    upgrader: Upgrader,
) -> ASGIApp:
    """Return the ASGI application over a running node; files are read from below ``roots`` only.

    ``callers`` are the permitted callers by the digests of their keys; without any, all of this machine are.
    """
    limits, server = config.limits, config.server
    has_several_keys = len({caller.name for caller in callers.values()}) > 1
    relays = Relays(node, limits, server, has_several_keys=has_several_keys)
    access = AccessCheck(Rates(time.monotonic))
    app: ASGIApp = build_routes(node, config, roots, reloader, upgrader, relays, access)
    if relays.elsewhere is not None:  # a node alone imports nothing of it
        from service.api.every_node import EveryNode  # noqa: PLC0415 - see above

        app = EveryNode(app, node, relays.elsewhere, limits)
    app = RelayedPaths(app, relays, access)
    app = Gate(app, keys=KeyRing(callers), hosts=server.hosts, origins=server.origins)
    if server.origins:  # outside the gate: a browser's preflight request has no key
        app = CORSMiddleware(
            app, allow_origins=server.origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["Location", "Retry-After"],
        )  # fmt: skip
    app = Heads(BufferedBodies(app, queue_bytes=limits.queue_bytes))
    return Measuring(app, observe=node.metrics.observe_request)  # outermost: refusals count too


def build_routes(
    node: Node,
    config: Config,
    roots: Sequence[Path],
    reloader: Reloader,
    upgrader: Upgrader,
    relays: Relays,
    access: AccessCheck,
) -> FastAPI:
    """Return all routes except the relayed ones, each behind the check of its caller's scopes."""
    limits = config.limits
    app = FastAPI(
        title="Roundhouse",
        version=__version__,
        description="Keeps LLM engines running and puts multi-agent conversation jobs on them.",
        docs_url=None,  # its page loads scripts from a foreign host
        redoc_url=None,
        openapi_url=None,  # a route of ours describes it
        dependencies=[Depends(access)],
    )
    problems.install(app)
    app.include_router(openai_router(relays))
    app.include_router(jobs_router(node.jobs, node.door, limits))
    app.include_router(job_router(node.jobs, node.prompts))
    app.include_router(callers_turns_router(node.jobs, node.callers, limits))
    app.include_router(rollouts_router(node.jobs, node.rollouts, limits))
    app.include_router(sessions_router(node.sessions, node.door.rules, limits))
    app.include_router(timeline_router(node))
    app.include_router(workers_router(node.fleet, lambda: node.scheduler.view))
    app.include_router(lanes_router(node.fleet.lane_pool))
    app.include_router(weights_router(node.fleet, limits, roots))
    app.include_router(loading_router(node))
    app.include_router(adapters_router(node, limits, roots))
    app.include_router(tools_router(node.catalog))
    app.include_router(model_router(node, relays.elsewhere))
    app.include_router(status_router(node))
    app.include_router(configuration_router(reloader))
    app.include_router(overview_router(node))
    app.include_router(speaking_router(node))
    app.include_router(metrics_router(node.metrics))
    app.include_router(usage_router(node.store))
    app.include_router(cluster_router(node))
    app.include_router(upgrade_router(upgrader))
    app.include_router(health_router(node.fleet, node.store, node.tools))
    app.include_router(page_router())
    described = cache(partial(_describe, app))

    @app.get("/openapi.json", include_in_schema=False)
    def describe() -> JSONResponse:  # made at the first request, in a thread: it takes 0.2 s
        return JSONResponse(described())

    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description."""
    from service.api.every_node import describe_nodes  # noqa: PLC0415 - few need it

    description = app.openapi()
    describe_nodes(description["paths"])
    description["paths"] = {**describe_relayed(), **description["paths"]}
    # We read these bodies, within bounds, and write errors ourselves; FastAPI does not know their schemas.
    schemas = description["components"]["schemas"]
    bodies: tuple[type[BaseModel], ...] = (
        JobSpec,
        Problem,
        *WEIGHTS_BODIES,
        *ADAPTER_BODIES,
        *CALLERS_BODIES,
        *ROLLOUT_BODIES,
        *SESSION_BODIES,
    )
    for body in bodies:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs", {}), body.__name__: schema}
    schemas |= msgspec.json.schema_components(
        (BatchLine, NodeResult, RolloutRow, Timeline),
        schema_hook=lambda _kind: {"description": "any JSON"},  # as an engine's parameters may be
        ref_template="#/components/schemas/{name}",
    )[1]
    # A bad parameter is a 400 in our own form; FastAPI lists its own 422 for every route with a parameter.
    for route in (route for path in description["paths"].values() for route in path.values()):
        if "HTTPValidationError" in str(route["responses"].get("422")):
            del route["responses"]["422"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return description
