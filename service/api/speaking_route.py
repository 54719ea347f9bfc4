"""GET /v1/speaking: the last words of turns in flight."""

from typing import Annotated

from fastapi import APIRouter, Query

from service.api.door.access import CallerNow
from service.api.problems import refused
from service.api.schemas import Body
from service.node.node import Node
from service.node.speaking import FEW, WORDS, SpeakingTurn, speaking


class SpeakingOut(Body):
    """The turns on slots, those that started last first; ``is_cut``: there are more."""

    turns: list[SpeakingTurn]
    is_cut: bool


def speaking_router(node: Node) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["status"])

    @router.get("/speaking", summary="Read the last words of turns in flight", responses=refused(400, 401))
    async def get_speaking(
        caller: CallerNow,
        limit: Annotated[int, Query(ge=1, le=100, description="so many turns at most")] = FEW,
        chars: Annotated[int, Query(ge=1, le=1000, description="so many characters of each")] = WORDS,
    ) -> SpeakingOut:
        turns, is_cut = speaking(node.scheduler, limit, chars, None if caller.sees_all else caller.sees)
        return SpeakingOut(turns=turns, is_cut=is_cut)

    return router
