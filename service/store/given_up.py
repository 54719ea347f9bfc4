"""Patterns and schemas that ran out of time too often in a job, in the store: no life of it tries them again."""

from collections.abc import Callable

from service.conversations.job import JobId, TurnKey
from service.store.databases.database import Connection
from service.store.records import GivenUp


def add(connection: Connection, given_up: GivenUp) -> None:
    """Write what is given up, unless it is there."""
    key = given_up.key
    connection.execute(
        "INSERT INTO given_up (job_id, path, pattern, conversation_id, agent, round) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
        (key.job_id, given_up.path, given_up.pattern or "", key.conversation_id, key.agent_id, key.round),
    )


def of_job(job_id: JobId, limit: int = 2**30, characters: int = 2**30) -> Callable[[Connection], list[GivenUp]]:
    """List what is given up in a job, ``limit`` at most, each with so many ``characters`` of its pattern."""

    def query(connection: Connection) -> list[GivenUp]:
        rows = connection.execute(
            "SELECT conversation_id, agent, round, path, substr(pattern, 1, ?) FROM given_up WHERE job_id = ?"
            " ORDER BY path, pattern LIMIT ?",
            (characters, job_id, limit),
        )
        return [
            GivenUp(key=TurnKey(job_id, row[0], row[1], row[2]), path=row[3], pattern=row[4] or None) for row in rows
        ]

    return query
