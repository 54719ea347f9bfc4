"""The usage of turns and requests, summed by day, key, job, agent and model.

Usage is added in the transaction that records an attempt's end, so each attempt is counted exactly once. Rows outlive
their jobs.

Source: specification, "Usage".
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Final

from msgspec.structs import fields

from service.conversations.record.measures import UsageCounts
from service.store.databases.database import Connection, value_of
from service.store.records import UsageKey, Used

_PLACES: Final = tuple(field.name for field in fields(UsageKey))
_COUNTS: Final = tuple(field.name for field in fields(UsageCounts))
_ADD: Final = (
    f"INSERT INTO usage ({', '.join((*_PLACES, *_COUNTS))})"  # noqa: S608 - names of our own
    f" VALUES ({', '.join('?' * len((*_PLACES, *_COUNTS)))}) ON CONFLICT ({', '.join(_PLACES)}) DO UPDATE SET "
    + ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in _COUNTS)
)


class UsageBy(StrEnum):
    """The ways to divide a report."""

    KEY = "key"
    JOB = "job"
    AGENT = "agent"
    MODEL = "model"
    DAY = "day"


COLUMNS: Final = {UsageBy.KEY: "key_name", UsageBy.JOB: "job_id"}
_place, _numbers = attrgetter(*_PLACES), attrgetter(*_COUNTS)


def add(connection: Connection, used: Iterable[Used]) -> None:
    """Add usage; rows are sorted, so that nodes that add to the same rows do not deadlock."""
    sums: dict[tuple[str, ...], list[float]] = {}
    for key, counts in used:
        row = sums.setdefault(_place(key), [0] * len(_COUNTS))
        for place, count in enumerate(_numbers(counts)):
            row[place] += count
    if sums:
        connection.execute_many(_ADD, [(*place, *row) for place, row in sorted(sums.items())])


def report(
    connection: Connection, by: Sequence[UsageBy], since: str | None, until: str | None, owner: str | None, limit: int
) -> list[tuple[dict[UsageBy, str], UsageCounts]]:
    """Sum the usage from day ``since`` to day ``until``, both included; return at most ``limit`` rows in order.

    With ``owner`` only usage of the key with that name.
    """
    columns = [COLUMNS.get(each, each.value) for each in by]
    bounds = {"day >= ?": since, "day <= ?": until, "key_name = ?": owner}
    given = {text: value for text, value in bounds.items() if value is not None}
    where = f" WHERE {' AND '.join(given)}" if given else ""
    order = f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}" if columns else ""
    sums = ", ".join((*columns, *(f"sum({name})" for name in _COUNTS)))
    sql = f"SELECT {sums} FROM usage{where}{order} LIMIT ?"  # noqa: S608 - names of our own
    rows = connection.execute(sql, (*given.values(), limit)).fetchall()
    return [(dict(zip(by, row, strict=False)), _counts(row[len(by) :])) for row in rows]


def _counts(row: Sequence[float | None]) -> UsageCounts:
    *counts, slot_s = (count or 0 for count in row)  # PostgreSQL sums integers as decimals, and no rows as NULL
    return UsageCounts(**dict(zip(_COUNTS, map(int, counts), strict=False)), slot_s=float(slot_s))


def has_older(connection: Connection, day: str) -> bool:
    """Whether there is usage before a day."""
    return connection.execute("SELECT 1 FROM usage WHERE day < ? LIMIT 1", (day,)).fetchone() is not None


def release(connection: Connection, day: str) -> None:
    """Delete the usage before a day."""
    connection.execute("DELETE FROM usage WHERE day < ?", (day,))


def unfinished_of(connection: Connection, owner: str) -> int:
    """Count the unfinished turns of jobs that the key with that name posted.

    Turns that wait for a caller do not count: they use nothing of Roundhouse. Turns that an unfinished conversation has
    inherited count, since they are stored for it.
    """
    left = value_of(
        connection,
        "SELECT coalesce(sum(total_turns - (SELECT count(*) FROM turns WHERE job_id = jobs.id AND kind = 'turn')"
        " - (SELECT count(*) FROM awaited_turns WHERE job_id = jobs.id AND is_said = 0)), 0)"
        " FROM jobs WHERE key_name = ? AND unfinished > 0",
        (owner,),
    )
    held = value_of(
        connection,
        "SELECT coalesce(sum(heritages.turns), 0) FROM jobs JOIN heritages ON heritages.job_id = jobs.id"
        " JOIN conversations ON conversations.job_id = jobs.id AND conversations.id = heritages.conversation_id"
        " WHERE jobs.key_name = ? AND jobs.unfinished > 0 AND conversations.state IN ('queued', 'running')",
        (owner,),
    )
    return int(left) + int(held)
