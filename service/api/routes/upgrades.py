"""GET and POST /v1/upgrade: the service replaces its own program, and its engines stay."""

import os
from collections.abc import Mapping, Sequence

from fastapi import APIRouter

from service import __version__
from service.api.errors.problems import refused
from service.api.schemas import Body
from service.conversations.transcript import rfc3339
from service.upgrade.upgrader import UpgradeEnd, UpgradePhase, Upgrader


class UpgradeEndOut(Body):
    """What became of an upgrade; ``detail`` is why it was refused, null where it was done.

    ``roundhouse`` is the version that left, or stayed. ``seconds`` is how long no program served. ``kept`` and
    ``ended`` are workers, ``kept_servers`` and ``ended_servers`` MCP servers over stdio, as MODEL/SERVER.
    """

    at: str
    roundhouse: str
    detail: str | None
    seconds: float | None
    kept: Sequence[str]
    ended: Mapping[str, str]
    kept_servers: Sequence[str]
    ended_servers: Mapping[str, str]


class UpgradeOut(Body):
    """The program that serves: its version, its process, and how many upgrades in place that has seen."""

    version: str
    pid: int
    upgrades: int
    phase: UpgradePhase
    last: UpgradeEndOut | None


class UpgradeAgreedOut(UpgradeOut):
    """An upgrade that has begun: to which version, and what becomes of engines."""

    to_version: str
    kept: Sequence[str]
    ended: Mapping[str, str]
    started: Sequence[str]


def upgrade_router(upgrader: Upgrader) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1", tags=["upgrade"])

    @router.get("/upgrade", summary="See which program serves, and its last upgrade", responses=refused(401))
    async def see() -> UpgradeOut:
        return UpgradeOut.model_validate(_now(upgrader))

    @router.post(
        "/upgrade",
        summary="Replace the program of the service by the one that is installed now; engines stay",
        status_code=202,
        responses=refused(401, 409),
    )
    async def upgrade() -> UpgradeAgreedOut:
        verdict = await upgrader.ask()
        agreed = {
            "to_version": verdict.roundhouse,
            "kept": verdict.kept,
            "ended": verdict.ended,
            "started": verdict.started,
        }
        return UpgradeAgreedOut.model_validate(_now(upgrader) | agreed)

    return router


def _now(upgrader: Upgrader) -> dict[str, object]:
    return {
        "version": __version__,
        "pid": os.getpid(),
        "upgrades": upgrader.upgrades,
        "phase": upgrader.phase,
        "last": None if upgrader.last is None else _end(upgrader.last),
    }


def _end(last: UpgradeEnd) -> dict[str, object]:
    return {
        "at": rfc3339(last.at) or "",
        "roundhouse": last.roundhouse,
        "detail": last.detail,
        "seconds": None if last.seconds is None else round(last.seconds, 3),
        "kept": list(last.kept),
        "ended": dict(last.ended),
        "kept_servers": list(last.kept_servers),
        "ended_servers": dict(last.ended_servers),
    }
