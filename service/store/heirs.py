"""Conversations that begin with turns of others: their references, and the turns stored for them.

A turn is stored once, in the job where it was spoken. When a job is deleted, the turns that heirs of the same key refer
to move to ``kept_turns``, until no such heir is left.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.job.job import Heritage, Job, JobId
from service.conversations.record.heritage import Share, as_inherited
from service.conversations.record.transcript import Turn
from service.errors import JobNotFound, NotEnded
from service.store.databases.database import Connection, some_of
from service.store.records import decode_turn

Shares = Mapping[str, Sequence[Share]]  # by the heir's conversation
_SHARED: Final = (
    "spoken.job_id = source_job AND spoken.conversation_id = source_conversation"
    " AND spoken.agent = heirs.agent AND spoken.kind = heirs.kind AND spoken.round < heirs.rounds"
    " AND spoken.state != 'cancelled'"
)
_SAME_KEY: Final = "coalesce((SELECT key_name FROM jobs WHERE id = heirs.job_id), '') = coalesce(?, '')"
_LOCK_KEPT: Final = (
    "UPDATE kept_turns SET state = state WHERE job_id = ? AND conversation_id = ? AND number ="
    " (SELECT min(number) FROM kept_turns WHERE job_id = ? AND conversation_id = ?)"
)
_decode = msgspec.json.Decoder(Heritage).decode


def check_sources(connection: Connection, job: Job, shares: Shares) -> None:
    """Check that the sources of a new job exist, and lock them against deletion until the job is stored.

    Turns of a deleted job may still be kept for an heir that is a source of the new job.

    Raises:
        JobNotFound: a source was deleted after it was read.
    """
    named = {each.heritage.source[0] for each in job.conversations if each.heritage.source is not None}
    for source in sorted({*named, *(share.job for those in shares.values() for share in those)}):
        # The update changes nothing, but a transaction that deletes the row waits for this one.
        is_there = connection.execute("UPDATE jobs SET name = name WHERE id = ?", (source,)).rowcount > 0
        if not is_there and (source in named or not _is_kept(connection, source)):
            raise JobNotFound(source)


def _is_kept(connection: Connection, job_id: JobId) -> bool:
    row = connection.execute("SELECT 1 FROM kept_turns WHERE job_id = ? LIMIT 1", (job_id,)).fetchone()
    return row is not None


def add(connection: Connection, job: Job, shares: Shares) -> None:
    """Write the heritage of the conversations of a new job."""
    heritages = [(each.id, each.heritage) for each in job.conversations if each.heritage.source is not None]
    connection.execute_many(
        "INSERT INTO heritages (job_id, conversation_id, heritage, turns) VALUES (?, ?, ?, ?)",
        ((job.id, name, msgspec.json.encode(each).decode(), each.turns) for name, each in heritages),
    )
    connection.execute_many(
        "INSERT INTO heirs (job_id, conversation_id, place, source_job, source_conversation, agent, kind, rounds)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (job.id, name, place, share.job, share.conversation, share.agent, share.kind.value, share.rounds)
            for name, those in shares.items()
            for place, share in _placed(those)
        ),
    )


def _placed(shares: Iterable[Share]) -> Iterator[tuple[int, Share]]:
    """Number the conversations in which turns were spoken, each of which began with the turns before it.

    The turns' own numbers cannot order them: numbers of a deleted job may be used again.
    """
    places: dict[tuple[JobId, str], int] = {}
    for share in shares:
        yield places.setdefault((share.job, share.conversation), len(places)), share


def heritages(connection: Connection, job_id: JobId, conversations: Collection[str]) -> dict[str, Heritage]:
    """Return the heritages of a job's conversations by id, for conversations that have one."""
    which, values = some_of("conversation_id", conversations)
    rows = connection.execute(
        f"SELECT conversation_id, heritage, is_lost FROM heritages WHERE job_id = ?{which}",  # noqa: S608
        (job_id, *values),
    )
    return {row[0]: replace(_decode(row[1]), is_lost=bool(row[2])) for row in rows if row[0] in conversations}


def inherited(connection: Connection, job_id: JobId, conversations: Collection[str]) -> list[Turn]:
    """List the turns that conversations of a job have inherited, as their own, in order.

    Each turn is read once, however many of them have inherited it.
    """
    which, values = some_of("conversation_id", conversations)
    shares = connection.execute(
        "SELECT conversation_id, place, rounds, source_job, source_conversation, agent, kind FROM heirs"  # noqa: S608
        f" WHERE job_id = ?{which}",
        (job_id, *values),
    ).fetchall()
    if not shares:
        return []
    spoken = _spoken(connection, job_id, which, values)
    wanted = frozenset(conversations)
    found = [
        (place, number, turn, name)
        for name, place, rounds, *source in shares
        if name in wanted
        for number, turn in spoken.get(tuple(source), ())
        if turn.key.round < rounds
    ]
    return [as_inherited(turn, job_id, name) for _, _, turn, name in sorted(found, key=itemgetter(0, 1))]


def _spoken(
    connection: Connection, job_id: JobId, which: str, values: Sequence[object]
) -> dict[tuple[str, ...], list[tuple[int, Turn]]]:
    """Return the turns that a job's conversations refer to, with their numbers, by source, agent and kind."""
    tables = [
        "SELECT number, record FROM (SELECT source_job, source_conversation, agent, kind, max(rounds) AS rounds"  # noqa: S608
        f" FROM heirs WHERE job_id = ?{which} GROUP BY source_job, source_conversation, agent, kind) AS heirs"
        f" JOIN {table} AS spoken ON {_SHARED}"
        for table in ("turns", "kept_turns")
    ]
    found: dict[tuple[str, ...], list[tuple[int, Turn]]] = {}
    for number, record in connection.execute(" UNION ALL ".join(tables), (job_id, *values) * 2):
        turn = decode_turn(record)
        found.setdefault((*turn.key[:3], turn.kind.value), []).append((number, turn))
    return found


def keep_for_all(connection: Connection, job_id: JobId) -> None:
    """Keep the turns that heirs of any key have inherited from a job about to be deleted for its age."""
    _keep(connection, job_id, None, "", ())


def _keep(connection: Connection, job_id: JobId, kept_for: str | None, of_heirs: str, values: Sequence[object]) -> None:
    connection.execute(
        "INSERT INTO kept_turns (number, job_id, conversation_id, agent, round, kind, state, record, kept_for)"  # noqa: S608
        " SELECT number, job_id, conversation_id, agent, round, kind, state, record, CAST(? AS TEXT)"
        " FROM turns AS spoken WHERE job_id = ? AND EXISTS"
        f" (SELECT 1 FROM heirs WHERE {_SHARED} AND heirs.job_id != source_job{of_heirs})",
        (kept_for, job_id, *values),
    )


def keep_for_heirs(connection: Connection, job_id: JobId, owner: str | None) -> list[JobId]:
    """Keep the turns that heirs of the same key have inherited from a job about to be deleted.

    Return the unfinished jobs of other keys with heirs, which are to be cancelled because they lose the turns.
    """
    _keep(connection, job_id, owner or "", f" AND {_SAME_KEY}", (owner,))
    return _disinherit(connection, f"source_job = ? AND NOT {_SAME_KEY}", (job_id, owner))


def _disinherit(connection: Connection, of_heirs: str, values: Sequence[object]) -> list[JobId]:
    """Take the inherited turns from heirs; return the unfinished jobs among them, which are to be cancelled."""
    losing = connection.execute(
        "UPDATE jobs SET is_cancel_requested = 1 WHERE unfinished > 0 AND id IN"  # noqa: S608
        f" (SELECT heirs.job_id FROM heirs WHERE {of_heirs}) RETURNING id",
        values,
    )
    lost = [JobId(row[0]) for row in losing.fetchall()]
    connection.execute(
        "UPDATE heritages SET is_lost = 1 WHERE EXISTS (SELECT 1 FROM heirs WHERE heirs.job_id = heritages.job_id"  # noqa: S608
        f" AND heirs.conversation_id = heritages.conversation_id AND {of_heirs})",
        values,
    )
    connection.execute(f"DELETE FROM heirs WHERE {of_heirs}", values)  # noqa: S608
    return lost


def heirs_of(connection: Connection, job_id: JobId, owner: str | None) -> list[JobId]:
    """Return the jobs of the same key with conversations that have inherited from a job.

    Raises:
        NotEnded: one of them has not ended.
    """
    rows = connection.execute(
        "SELECT DISTINCT id, state, unfinished FROM jobs JOIN heirs ON heirs.job_id = id"
        " WHERE source_job = ? AND coalesce(key_name, '') = coalesce(?, '')",
        (job_id, owner),
    ).fetchall()
    for heir, state, unfinished in rows:
        if unfinished:
            raise NotEnded(heir, state)
    return [JobId(row[0]) for row in rows]


def sources_of(connection: Connection, jobs: Iterable[JobId]) -> list[tuple[str, str]]:
    """Return the conversations from which jobs have inherited."""
    rows = [
        row
        for job_id in jobs
        for row in connection.execute(
            "SELECT DISTINCT source_job, source_conversation FROM heirs WHERE job_id = ?", (job_id,)
        ).fetchall()
    ]
    return [(row[0], row[1]) for row in rows]


def lock(connection: Connection, jobs: Collection[JobId], sources: Iterable[tuple[str, str]]) -> None:
    """Lock jobs about to be deleted, and their sources, against new heirs and other deletions.

    Otherwise each of two concurrent deletions would keep turns for the other's heirs.
    """
    sources = sorted(sources)
    for job_id in sorted({*jobs, *(source for source, _ in sources)}):
        connection.execute("UPDATE jobs SET name = name WHERE id = ?", (job_id,))
    for source in sources:  # one row stands for all kept turns, since their job is gone
        connection.execute(_LOCK_KEPT, (*source, *source))


def drop_unused(connection: Connection, sources: Iterable[tuple[str, str]]) -> None:
    """Delete the kept turns of these conversations that no heir has inherited any more."""
    for source in sources:
        connection.execute(
            "DELETE FROM kept_turns WHERE job_id = ? AND conversation_id = ? AND NOT EXISTS (SELECT 1 FROM heirs"
            " WHERE source_job = kept_turns.job_id AND source_conversation = kept_turns.conversation_id"
            " AND heirs.agent = kept_turns.agent AND heirs.kind = kept_turns.kind AND heirs.rounds > kept_turns.round)",
            source,
        )


def drop_without_owner(connection: Connection, sources: Iterable[tuple[str, str]], owner: str | None) -> list[JobId]:
    """Delete the turns kept for a key whose last heir was deleted.

    Return the unfinished jobs of other keys with heirs, which are to be cancelled because they lose the turns.
    """
    cancelled: list[JobId] = []
    for source in sources:
        left = connection.execute(
            "DELETE FROM kept_turns WHERE job_id = ? AND conversation_id = ? AND kept_for = ? AND NOT EXISTS"
            " (SELECT 1 FROM heirs JOIN jobs ON jobs.id = heirs.job_id WHERE source_job = kept_turns.job_id"
            " AND source_conversation = kept_turns.conversation_id AND coalesce(key_name, '') = kept_for)",
            (*source, owner or ""),
        )
        if left.rowcount:
            cancelled += _disinherit(connection, "source_job = ? AND source_conversation = ?", source)
    return cancelled
