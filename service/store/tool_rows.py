"""The journal of tool calls: each is written before it is made, and completed after it."""

from typing import Final

from service.conversations.job.job import TurnKey
from service.conversations.record.transcript import rfc3339
from service.store.databases.database import Connection
from service.store.records import StoredToolCall, ToolCallEnded, ToolCallStarted

# A repeated call has no outcome yet, whatever the earlier one returned.
_START: Final = (
    "INSERT INTO tool_calls (job_id, conversation_id, agent, round, key, number, name, arguments, policy, started_at)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job_id, conversation_id, agent, round, key)"
    " DO UPDATE SET started_at = excluded.started_at, outcome = NULL, ended_at = NULL"
)
_END: Final = (
    "UPDATE tool_calls SET outcome = ?, ended_at = ?"
    " WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? AND key = ?"
)
_OF_TURN: Final = (
    "SELECT key, number, name, arguments, policy, outcome FROM tool_calls"
    " WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? ORDER BY number"
)


def start(connection: Connection, fact: ToolCallStarted) -> None:
    """Write a call that is about to be made."""
    call = (fact.call, fact.number, fact.name, fact.arguments, fact.policy, rfc3339(fact.at))
    connection.execute(_START, (*fact.key, *call))


def end(connection: Connection, fact: ToolCallEnded) -> None:
    """Write the outcome of a call."""
    connection.execute(_END, (fact.outcome, rfc3339(fact.at), *fact.key, fact.call))


def of_turn(connection: Connection, key: TurnKey) -> list[StoredToolCall]:
    """List the calls that a turn has begun in all its attempts, in order."""
    return [
        StoredToolCall(call=row[0], number=row[1], name=row[2], arguments=row[3], policy=row[4], outcome=row[5])
        for row in connection.execute(_OF_TURN, tuple(key))
    ]
