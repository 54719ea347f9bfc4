"""The conversations of a job as a list shows them, in the store, and the heads of their turns."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from service.conversations.job import JobId, TurnKey, TurnKind
from service.conversations.states import ConversationState, TurnState
from service.conversations.until import Ending
from service.store import awaited_turns
from service.store.databases.database import Connection
from service.store.queries import Query


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as a list shows it, by its place in its job; for the agents it ``awaits`` a caller speaks."""

    id: str
    position: int
    state: ConversationState
    reason: str | None
    ending: Ending | None
    awaits: Sequence[str] = ()


class TokensSaid(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a turn's answers."""

    completion_tokens: int | None = None


class TurnHead(msgspec.Struct, gc=False):
    """The part of an ended turn that a list tells."""

    key: TurnKey
    state: TurnState
    text: str = ""
    detail: str | None = None
    usage: TokensSaid = TokensSaid()
    kind: TurnKind = TurnKind.TURN
    started_at: datetime | None = None
    finished_at: datetime | None = None


_decode_ending = msgspec.json.Decoder(Ending).decode
_decode_head = msgspec.json.Decoder(TurnHead).decode


def conversation_rows(job_id: JobId) -> Query[list[ConversationRow]]:
    """List the conversations of a job in its order."""

    def query(connection: Connection) -> list[ConversationRow]:
        awaits = awaited_turns.agents(job_id)(connection)
        rows = connection.execute(
            "SELECT id, position, state, reason, ending FROM conversations WHERE job_id = ? ORDER BY position",
            (job_id,),
        )
        return [
            ConversationRow(
                id=row[0],
                position=row[1],
                state=ConversationState(row[2]),
                reason=row[3],
                ending=None if row[4] is None else _decode_ending(row[4]),
                awaits=awaits.get(row[0], ()),
            )
            for row in rows
        ]

    return query


def turn_heads(job_id: JobId, after: int) -> Query[tuple[list[tuple[int, TurnHead]], int]]:
    """List the heads of a job's ended turns with a number above ``after``, and count all that have ended."""

    def query(connection: Connection) -> tuple[list[tuple[int, TurnHead]], int]:
        rows = connection.execute(
            "SELECT number, record FROM turns WHERE job_id = ? AND number > ? ORDER BY number", (job_id, after)
        )
        heads = [(row[0], _decode_head(row[1])) for row in rows]
        counted = connection.execute("SELECT count(*) FROM turns WHERE job_id = ?", (job_id,)).fetchone()
        return heads, 0 if counted is None else int(counted[0])

    return query


def last_heads(places: Sequence[tuple[JobId, str]]) -> Query[list[tuple[str, TurnHead | None]]]:
    """Return the name of the job of each conversation, and the head of the turn that was said last there."""

    def query(connection: Connection) -> list[tuple[str, TurnHead | None]]:
        found: list[tuple[str, TurnHead | None]] = []
        for job_id, conversation_id in places:
            name = connection.execute("SELECT name FROM jobs WHERE id = ?", (job_id,)).fetchone()
            last = connection.execute(
                "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? AND kind = 'turn'"
                " AND state = 'completed' ORDER BY number DESC LIMIT 1",
                (job_id, conversation_id),
            ).fetchone()
            found.append(("" if name is None else str(name[0]), None if last is None else _decode_head(last[0])))
        return found

    return query
