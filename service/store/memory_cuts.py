"""From which turn on rounds are shown to an agent no more, in the store: decided once, before the turn is asked."""

from collections.abc import Callable, Collection

from service.conversations.job import JobId, TurnKey
from service.store.databases.database import Connection, some_of
from service.store.records import MemoryCut


def add(connection: Connection, cut: MemoryCut) -> None:
    """Write a cut, unless it is there."""
    connection.execute(
        "INSERT INTO memory_cuts (job_id, conversation_id, agent, round, from_round) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
        (*cut.key, cut.from_round),
    )


def of_conversations(job_id: JobId, conversations: Collection[str]) -> Callable[[Connection], list[MemoryCut]]:
    """List the cuts of conversations of a job."""

    def query(connection: Connection) -> list[MemoryCut]:
        which, values = some_of("conversation_id", conversations)
        rows = connection.execute(
            f"SELECT conversation_id, agent, round, from_round FROM memory_cuts WHERE job_id = ?{which}",  # noqa: S608
            (job_id, *values),
        )
        return [
            MemoryCut(key=TurnKey(job_id, row[0], row[1], row[2]), from_round=row[3])
            for row in rows
            if row[0] in conversations
        ]

    return query
