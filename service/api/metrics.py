"""The HTTP surface of metrics."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from service.api.problems import refused
from service.telemetry.metrics import Metrics


def metrics_router(metrics: Metrics) -> APIRouter:
    """Return the route that Prometheus asks."""
    router = APIRouter(tags=["health"])

    @router.get(
        "/metrics",
        summary="Metrics, in Prometheus' text format",
        response_class=PlainTextResponse,
        responses=refused(401),
    )
    async def read() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
