"""GET /v1/jobs/{id}/timeline: which attempt held which slot when, streamed in pieces."""

from collections.abc import AsyncIterator
from typing import Final

import anyio.lowlevel
from fastapi import APIRouter, Depends, Response
from starlette.responses import StreamingResponse

from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.conversations.job import JobId
from service.node.node import Node

JSON: Final = "application/json"


def timeline_router(node: Node) -> APIRouter:
    """Return the route: to whom a job is another's, it is not there."""

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await node.jobs.check_seen(JobId(job_id), caller)

    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"], dependencies=[Depends(check_seen)])

    @router.get(
        "/timeline",
        response_class=StreamingResponse,
        summary="See which attempt held which slot when",
        responses={
            200: {"content": {JSON: {"schema": {"$ref": "#/components/schemas/Timeline"}}}},
            **refused(401, 404, 503),
        },
    )
    async def get_timeline(job_id: str) -> Response:
        return StreamingResponse(_sent(await node.timelines.of_job(JobId(job_id))), media_type=JSON)

    return router


async def _sent(pieces: list[bytes]) -> AsyncIterator[bytes]:
    """Send piece by piece, and let everybody else have a turn between them."""
    for piece in pieces:
        yield piece
        await anyio.lowlevel.checkpoint()
