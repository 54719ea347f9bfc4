"""Conversations: their states, the words around them, and their records; the last one that ends also ends its job."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import Job, JobId, TurnKey
from service.conversations.job.states import ENDED_CONVERSATIONS, ConversationState, JobState, job_state_after
from service.conversations.job.until import Ending
from service.conversations.job.wording import (
    ConversationWords,
    decode_clock,
    decode_models,
    encode_clock,
    encode_models,
)
from service.conversations.record.transcript import ConversationRecord, ended_by, rfc3339
from service.errors import ConversationNotFound
from service.store import awaited_turns, deliveries, event_rows, heirs, job_rows, turn_rows
from service.store.databases.database import FEW, Connection, some_of
from service.store.event_rows import Events
from service.store.records import ConversationMoved, ConversationWorded, decode_turn

_MOVE: Final = (
    "UPDATE conversations SET state = ?, reason = ?, ending = ?"
    " WHERE job_id = ? AND id = ? AND fence = ? AND state != ?"
)
_END: Final = _MOVE.replace(" WHERE", ", owner = NULL WHERE")
# A caller may have spoken at the moment of the end.
_LEAVE_OUT: Final = (
    "UPDATE jobs SET total_turns = total_turns - ?"
    " + (SELECT count(*) FROM turns WHERE job_id = jobs.id AND conversation_id = ? AND kind = 'turn') WHERE id = ?"
)
_COUNT_END: Final = "UPDATE jobs SET unfinished = unfinished - 1 WHERE id = ? RETURNING unfinished, is_cancel_requested"
_FAILED: Final = (
    "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? AND state = 'failed' ORDER BY number"
)
_FORGET_AWAITED: Final = (
    "DELETE FROM awaited_turns WHERE job_id = ? AND conversation_id = ? RETURNING agent, round, is_said"
)
_UNHEARD: Final = (
    "SELECT agent, round FROM open_turns WHERE job_id = ? AND conversation_id = ? AND is_said = 1 AND owner IS NOT NULL"
)
_TURNS: Final = "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? ORDER BY number LIMIT ? OFFSET ?"
_WORDS: Final = "SELECT id, began_at, words FROM conversations JOIN wordings ON digest = wording WHERE job_id = ?"
_WORDS_OF_ONE: Final = f"{_WORDS} AND id = ?"
_decode_ending = msgspec.json.Decoder(Ending).decode
_decode_posted = msgspec.json.Decoder(PostedRequest).decode


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in a list, with its position in the job; callers speak for the agents in ``awaits``."""

    id: str
    position: int
    state: ConversationState
    reason: str | None
    ending: Ending | None
    awaits: Sequence[str] = ()


# Writing


def keep_words(connection: Connection, fact: ConversationWorded) -> None:
    """Write the words around a conversation."""
    text = encode_models(fact.words.models)
    digest = hashlib.sha256(text.encode()).hexdigest()
    connection.execute(
        "INSERT INTO wordings (digest, words) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING", (digest, text)
    )
    connection.execute(
        "UPDATE conversations SET began_at = ?, wording = ? WHERE job_id = ? AND id = ?",
        (encode_clock(fact.words.began_at), digest, *fact.place),
    )


def keep_posted(connection: Connection, job: Job) -> None:
    """Write the posted bodies of a job's conversations."""
    for each in job.conversations:
        if each.posted is not None:
            request = msgspec.json.encode(replace(each.posted, body=b"")).decode()
            connection.execute(
                "INSERT INTO posted_requests (job_id, conversation_id, request, body) VALUES (?, ?, ?, ?)",
                (job.id, each.id, request, each.posted.body),
            )


def move(connection: Connection, fact: ConversationMoved, fence: int, events: Events) -> None:
    """Write the state of a conversation, and the state of its job if that changes too."""
    is_over = fact.state in ENDED_CONVERSATIONS
    ending = None if fact.ending is None else msgspec.json.encode(fact.ending).decode()
    state = fact.state.value
    moved = connection.execute(_END if is_over else _MOVE, (state, fact.reason, ending, *fact.place, fence, state))
    if not moved.rowcount:
        return
    if not is_over:
        _start_job(connection, fact, events)
    fields: dict[str, object] = {"conversation": fact.conversation_id, "state": state, "reason": fact.reason}
    if is_over:
        fields["ended_by"] = ended_by(fact.state, fact.ending)
    event_rows.add_event(events, fact.job_id, "conversation", {**fields, "at": rfc3339(fact.at)})
    if fact.most is not None:  # its other turns do not exist, even if they were tried
        connection.execute(_LEAVE_OUT, (fact.most, fact.conversation_id, fact.job_id))
        connection.execute("DELETE FROM unfinished_turns WHERE job_id = ? AND conversation_id = ?", fact.place)
    if is_over:
        waited = connection.execute(_FORGET_AWAITED, fact.place).fetchall()
        if said := {TurnKey(*fact.place, agent, number) for agent, number, is_said in waited if is_said}:
            turn_rows.hear_last(connection, said)
        _count_end(connection, fact, events)


def _start_job(connection: Connection, fact: ConversationMoved, events: Events) -> None:
    started = connection.execute(
        "UPDATE jobs SET state = ?, started_at = ? WHERE id = ? AND state = ?",
        (JobState.RUNNING.value, rfc3339(fact.at), fact.job_id, JobState.QUEUED.value),
    )
    if started.rowcount:
        _add_job_event(events, "job", fact, JobState.RUNNING)


def _count_end(connection: Connection, fact: ConversationMoved, events: Events) -> None:
    """Count the end of a conversation; the last one ends the job, on whichever node it ran."""
    row = connection.execute(_COUNT_END, (fact.job_id,)).fetchone()
    if row is None or row[0] > 0:
        return
    ways = connection.execute("SELECT DISTINCT state FROM conversations WHERE job_id = ?", (fact.job_id,)).fetchall()
    state = job_state_after(frozenset(ConversationState(way[0]) for way in ways), was_cancelled=bool(row[1]))
    connection.execute(
        "UPDATE jobs SET state = ?, finished_at = ? WHERE id = ?", (state.value, rfc3339(fact.at), fact.job_id)
    )
    _add_job_event(events, "end", fact, state)
    deliveries.add(connection, fact.job_id, fact.at)


def _add_job_event(events: Events, kind: str, fact: ConversationMoved, state: JobState) -> None:
    event_rows.add_event(events, fact.job_id, kind, {"state": state.value, "at": rfc3339(fact.at)})


# Reading


def posted(connection: Connection, job_id: JobId, conversations: Collection[str]) -> dict[str, PostedRequest]:
    """Return the posted bodies of a job's conversations, by id."""
    which, values = some_of("conversation_id", conversations)
    rows = connection.execute(
        f"SELECT conversation_id, request, body FROM posted_requests WHERE job_id = ?{which}",  # noqa: S608
        (job_id, *values),
    )
    return {row[0]: replace(_decode_posted(row[1]), body=bytes(row[2])) for row in rows if row[0] in conversations}


def record(connection: Connection, job_id: JobId, conversation_id: str, after: int = 0) -> ConversationRecord:
    """Return a conversation with its ended turns, skipping ``after``.

    Callers' words that the node of the conversation has not heard yet are left out.

    JobNotFound or ConversationNotFound if either does not exist.
    """
    job_rows.job(connection, job_id)
    place = (job_id, conversation_id)
    row = connection.execute(
        "SELECT metadata, state, reason, ending FROM conversations WHERE job_id = ? AND id = ?", place
    ).fetchone()
    if row is None:
        raise ConversationNotFound(*place)
    hidden = {TurnKey(*place, agent, number) for agent, number in connection.execute(_UNHEARD, place)}
    failed = [decode_turn(turn[0]) for turn in connection.execute(_FAILED, place)]
    before = heirs.inherited(connection, job_id, [conversation_id])
    skipped = max(0, after - len(before))
    rows = connection.execute(_TURNS, (*place, job_rows.LAST_NUMBER, 0 if hidden else skipped))
    turns = [decode_turn(each[0]) for each in rows]
    if hidden:  # their places are not known yet, and the places of those that are shown never change
        turns = [turn for turn in turns if turn.key not in hidden][skipped:]
    return ConversationRecord(
        id=conversation_id,
        metadata=msgspec.json.decode(row[0]),
        state=ConversationState(row[1]),
        reason=row[2],
        ending=None if row[3] is None else _decode_ending(row[3]),
        left=tuple(turn.key.agent_id for turn in (*before, *failed) if turn.leaves and turn.key not in hidden),
        turns=(*before[after:], *turns),
    )


def listed(connection: Connection, job_id: JobId) -> list[ConversationRow]:
    """List the conversations of a job in order."""
    awaits = awaited_turns.agents(connection, job_id)
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


def states(connection: Connection, job_id: JobId) -> dict[str, ConversationState]:
    """Return the state of each conversation of a job, in order."""
    rows = connection.execute("SELECT id, state FROM conversations WHERE job_id = ? ORDER BY position", (job_id,))
    return {row[0]: ConversationState(row[1]) for row in rows}


def words(connection: Connection, job_id: JobId, conversations: Collection[str]) -> dict[str, ConversationWords]:
    """Return the words of begun conversations."""
    if len(conversations) > FEW:
        wanted = frozenset(conversations)
        rows = [row for row in connection.execute(_WORDS, (job_id,)) if row[0] in wanted]
    else:
        rows = [row for name in conversations for row in connection.execute(_WORDS_OF_ONE, (job_id, name))]
    return {
        name: ConversationWords(began_at=decode_clock(began_at), models=decode_models(text))
        for name, began_at, text in rows
    }
