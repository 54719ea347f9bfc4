"""Rollouts: the recorded tokens of turns, the order in which conversations can be read, and their rewards."""

from collections.abc import Sequence
from typing import Final

import msgspec

from service.conversations.job.job import JobId
from service.conversations.record.rollout import Reward, SpokenTokens
from service.conversations.record.token_arrays import unpack
from service.conversations.record.transcript import Turn
from service.errors import RewardConflict
from service.store.databases.database import Connection, value_of
from service.store.event_rows import to_json
from service.store.records import decode_turn

_UNREADY: Final = (
    "SELECT id FROM conversations WHERE job_id = ? AND state IN ('completed', 'failed', 'cancelled')"
    " AND NOT EXISTS (SELECT 1 FROM rollouts WHERE rollouts.job_id = conversations.job_id"
    " AND conversation_id = conversations.id) ORDER BY position"
)
_TOKENS: Final = (
    "SELECT record, tokens FROM turns LEFT JOIN turn_tokens ON turn_tokens.number = turns.number"
    " WHERE job_id = ? AND conversation_id = ? AND kind = 'turn' AND state = 'completed' ORDER BY turns.number"
)
_ADD_READY: Final = (
    "INSERT INTO rollouts (job_id, number, conversation_id)"
    " SELECT CAST(? AS TEXT), coalesce(max(number), 0) + 1, CAST(? AS TEXT) FROM rollouts WHERE job_id = ?"
    " ON CONFLICT DO NOTHING"
)
_decode_metrics = msgspec.json.Decoder(dict[str, float]).decode


def unready(connection: Connection, job_id: JobId) -> list[str]:
    """List the ended conversations of a job whose rollouts cannot be read yet."""
    return [row[0] for row in connection.execute(_UNREADY, (job_id,))]


def make_ready(
    connection: Connection, job_id: JobId, conversations: Sequence[str], rewards: dict[str, dict[str, Reward]]
) -> None:
    """Let the rollouts of conversations be read from now on, with the rewards that their source gave.

    A reward that is there already stays.
    """
    connection.execute("UPDATE jobs SET name = name WHERE id = ?", (job_id,))  # others that number its rows wait
    for name in conversations:
        for agent, reward in rewards.get(name, {}).items():
            _insert(connection, (job_id, name, agent), reward)
        connection.execute(_ADD_READY, (job_id, name, job_id))


def ready(connection: Connection, job_id: JobId, after: int, limit: int) -> list[tuple[int, str]]:
    """List conversations whose rollouts can be read, with a number above ``after``."""
    sql = "SELECT number, conversation_id FROM rollouts WHERE job_id = ? AND number > ? ORDER BY number LIMIT ?"
    return [(row[0], row[1]) for row in connection.execute(sql, (job_id, after, limit))]


def state_of(connection: Connection, job_id: JobId, conversation_id: str) -> str:
    """Return the state of a conversation."""
    sql = "SELECT state FROM conversations WHERE job_id = ? AND id = ?"
    return str(value_of(connection, sql, (job_id, conversation_id), ""))


def spoken(connection: Connection, job_id: JobId, conversation_id: str) -> list[tuple[Turn, SpokenTokens | None]]:
    """List a conversation's completed turns, with the tokens of those that were recorded."""
    found: list[tuple[Turn, SpokenTokens | None]] = []
    for record, packed in connection.execute(_TOKENS, (job_id, conversation_id)):
        turn = decode_turn(record)
        tokens = None
        if turn.recorded is not None:
            messages = [] if packed is None else unpack(bytes(packed))
            tokens = SpokenTokens(
                agent=turn.key.agent_id, round=turn.key.round, messages=messages, partial=turn.recorded.partial
            )
        found.append((turn, tokens))
    return found


def rewards(connection: Connection, job_id: JobId, conversation_id: str) -> dict[str, Reward]:
    """Return the rewards of a conversation by agent, with an empty name for that of all agents."""
    rows = connection.execute(
        "SELECT agent, reward, error, metrics FROM rewards WHERE job_id = ? AND conversation_id = ?",
        (job_id, conversation_id),
    )
    return {row[0]: Reward(reward=row[1], error=row[2], metrics=_decode_metrics(row[3])) for row in rows}


def put_reward(connection: Connection, place: tuple[JobId, str, str], reward: Reward) -> bool:
    """Store a reward; return whether it is new. A reward whose source has failed gives way.

    Raises:
        RewardConflict: there is another one.
    """
    connection.execute("UPDATE jobs SET name = name WHERE id = ?", (place[0],))
    known = rewards(connection, *place[:2]).get(place[2])
    if known is None:
        _insert(connection, place, reward)
        return True
    if known.error is not None:
        sql = "DELETE FROM rewards WHERE job_id = ? AND conversation_id = ? AND agent = ?"
        connection.execute(sql, place)
        _insert(connection, place, reward)
        return True
    if known != reward:
        whose = f"agent {place[2]!r} in conversation" if place[2] else "conversation"
        raise RewardConflict(f"{whose} {place[1]!r}")
    return False


def _insert(connection: Connection, place: tuple[JobId, str, str], reward: Reward) -> None:
    connection.execute(
        "INSERT INTO rewards (job_id, conversation_id, agent, reward, error, metrics) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
        (*place, reward.reward, reward.error, to_json(reward.metrics)),
    )


def size(connection: Connection) -> int:
    """Return the bytes of all recorded tokens."""
    return int(value_of(connection, "SELECT coalesce(sum(length(tokens)), 0) FROM turn_tokens"))
