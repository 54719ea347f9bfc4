"""GET /v1/usage: the usage of each key, job, agent and model, by day."""

import re
from datetime import date
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response
from pydantic import BeforeValidator

from roundhouse_client.values.node import UsageReport
from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.conversations.record.measures import UsageCounts
from service.errors import InvalidParameter
from service.store import usage
from service.store.store import Store
from service.store.usage import UsageBy

ALL = ", ".join(UsageBy)
_ONE = "|".join(UsageBy)
EACH_ONCE = rf"^(?!.*\b(\w+)\b.*\b\1\b)(({_ONE})(,({_ONE}))*)?$"
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def _written_day(value: object) -> object:
    """Refuse numbers: pydantic takes them for seconds since 1970."""
    if isinstance(value, str) and not DAY.fullmatch(value):
        raise ValueError("must be a day, such as 2026-11-24")
    return value


Day = Annotated[date, BeforeValidator(_written_day)]


def usage_router(store: Store) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1/usage", tags=["usage"])

    @router.get("", summary="Read the usage", response_model=UsageReport, responses=refused(400, 401, 503))
    async def read_usage(
        caller: CallerNow,
        by: Annotated[
            str,
            Query(
                description=f"any of {ALL}, separated by commas; empty for one total",
                json_schema_extra={"pattern": EACH_ONCE},
            ),
        ] = "key,model,day",
        since: Annotated[Day | None, Query(description="the first day, in UTC")] = None,
        until: Annotated[Day | None, Query(description="the last day, in UTC")] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> Response:
        dimensions = _dimensions(by)
        first, last = (None if day is None else day.isoformat() for day in (since, until))
        owner = caller.owner
        rows = await store.read(usage.report, dimensions, first, last, owner, limit + 1)
        shown = [_line(place, counts) for place, counts in rows[:limit]]
        report = {"by": dimensions, "usage": shown, "is_cut": len(rows) > limit}
        return Response(msgspec.json.encode(report), media_type="application/json")

    return router


def _dimensions(by: str) -> list[UsageBy]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    unknown = next((name for name in names if name not in list(UsageBy)), None)
    if unknown is not None or len(set(names)) < len(names):
        raise InvalidParameter(f"by: {unknown or by}: give any of {ALL}, each once and separated by commas")
    return [UsageBy(name) for name in names]


def _line(place: dict[UsageBy, str], counts: UsageCounts) -> dict[str, object]:
    """Return a ``UsageLine`` without the dimensions that were not asked for."""
    fields: dict[str, object] = msgspec.to_builtins(counts)
    return {**{by.value: place[by] or None for by in place}, **fields, "slot_s": round(counts.slot_s, 3)}
