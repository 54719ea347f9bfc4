"""GET and POST /v1/upgrade: the service replaces its own program, and its engines stay."""

import os
from dataclasses import replace
from typing import TypedDict

import msgspec
from fastapi import APIRouter

from roundhouse_client.values.node import AgreedUpgrade, ServiceProgram, UpgradeEnd
from service import __version__
from service.api.errors.problems import refused
from service.upgrade import upgrader as upgrades
from service.upgrade.upgrader import Upgrader


def upgrade_router(upgrader: Upgrader) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1", tags=["upgrade"])

    @router.get("/upgrade", summary="See which program serves, and its last upgrade", responses=refused(401))
    async def see() -> ServiceProgram:
        return ServiceProgram(**_now(upgrader))

    @router.post(
        "/upgrade",
        summary="Replace the service's program with the one now installed; engines stay loaded",
        status_code=202,
        responses=refused(401, 409),
    )
    async def upgrade() -> AgreedUpgrade:
        verdict = await upgrader.ask()
        return AgreedUpgrade(
            **_now(upgrader),
            to_version=verdict.roundhouse,
            kept=tuple(verdict.kept),
            ended=verdict.ended,
            started=tuple(verdict.started),
        )

    return router


class _Now(TypedDict):
    version: str
    pid: int
    upgrades: int
    phase: str
    last: UpgradeEnd | None


def _now(upgrader: Upgrader) -> _Now:
    last = upgrader.last
    return {
        "version": __version__,
        "pid": os.getpid(),
        "upgrades": upgrader.upgrades,
        "phase": upgrader.phase,
        "last": None if last is None else _end(last),
    }


def _end(last: upgrades.UpgradeEnd) -> UpgradeEnd:
    shown = msgspec.convert(last, UpgradeEnd, from_attributes=True)
    return shown if shown.seconds is None else replace(shown, seconds=round(shown.seconds, 3))
