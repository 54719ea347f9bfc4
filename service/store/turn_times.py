"""The times of a job's turns, a page at a time: a job of 10,000 conversations has more than is read at once."""

from typing import Final, NamedTuple

import msgspec

from service.conversations.job import JobId
from service.store.databases.database import Connection
from service.store.queries import Query
from service.timeline.spans import TurnTimes

TURNS_A_PAGE: Final = 500
_decode = msgspec.json.Decoder(TurnTimes).decode


class After(NamedTuple):
    """Behind which turn a page begins."""

    conversation: str = ""
    agent: str = ""
    round: int = -1


def ended_turns(job_id: JobId, after: After) -> Query[tuple[list[TurnTimes], After | None]]:
    """Return a page of ended turns, and where the next one begins, None after the last."""
    return _page("turns", job_id, after)


def unfinished_turns_of_job(job_id: JobId, after: After) -> Query[tuple[list[TurnTimes], After | None]]:
    """Return a page of turns that were on a slot and have not ended, and where the next one begins."""
    return _page("unfinished_turns", job_id, after)


def _page(table: str, job_id: JobId, after: After) -> Query[tuple[list[TurnTimes], After | None]]:
    def query(connection: Connection) -> tuple[list[TurnTimes], After | None]:
        # By the key, which has an index in both tables: no page sorts the whole job.
        rows = connection.execute(
            f"SELECT record, conversation_id, agent, round FROM {table}"  # noqa: S608
            " WHERE job_id = ? AND (conversation_id, agent, round) > (?, ?, ?)"
            " ORDER BY conversation_id, agent, round LIMIT ?",
            (job_id, *after, TURNS_A_PAGE),
        ).fetchall()
        turns = [_decode(row[0]) for row in rows]
        return turns, After(*rows[-1][1:]) if len(rows) == TURNS_A_PAGE else None

    return query
