"""Sessions: opened, read and deleted here; their requests are answered at the front door, and recorded.

An exchange is durable before its client hears the last byte of it. It is certain once its client has all of it, or once
a later request repeats the answer. Only certain exchanges become rows.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from service.conversations.callers import Caller
from service.conversations.record.episode import EpisodeOrigin, episode_of
from service.conversations.record.rollout import Reward, RowPlace, rows_of
from service.conversations.record.session import (
    CONVERSATION,
    Asked,
    Session,
    SessionExchange,
    SessionWanted,
    chains_of_session,
    exchange_of,
    marks_in,
    prompts_of_session,
    text_of,
    texts_of_session,
)
from service.errors import SessionNotFound, StoreUnavailable
from service.node.rollouts import DELIVERED, RolloutForm, outcome_of
from service.scheduling.keeping.request import RelayFailure
from service.scheduling.keeping.requests import RelayedRequests
from service.scheduling.keeping.token_keeper import TokenKeeper
from service.store import session_rows
from service.store.session_rows import PackedExchange, SessionCounts, pack_exchange
from service.store.store import Store
from workers.requests.answer import Answer
from workers.requests.tokens import Lacking

ID_BYTES: Final = 16
SETTLING_S: Final = 1.0
LOOK_S: Final = 0.02
STATE: Final = "completed"  # in all rows: what they have has ended


class Sessions:
    """The sessions of the store.

    ``version_of`` returns the present version of a model's weights, None without one.
    """

    def __init__(
        self,
        store: Store,
        requests: RelayedRequests,
        tokens: TokenKeeper,
        version_of: Callable[[str], int | None],
    ) -> None:
        self._requests = requests
        self._store = store
        self._tokens = tokens
        self._version_of = version_of

    def __repr__(self) -> str:
        return f"<Sessions {self._tokens!r}>"

    async def open_session(self, wanted: SessionWanted, owner: str | None) -> Session:
        """Open a session of a key, durable when this returns.

        Raises:
            SessionsFull: there are too many.
        """
        now = datetime.now(UTC)
        session = Session(
            id=f"s-{secrets.token_hex(ID_BYTES)}",
            owner=owner,
            created_at=now,
            expires_at=now + timedelta(seconds=wanted.ttl_s),
            model=wanted.model,
            records=wanted.records,
            max_staleness=wanted.max_staleness,
            ttl_s=wanted.ttl_s,
        )
        await self._store.write(session_rows.add, session)
        return session

    async def find_seen(self, session_id: str, caller: Caller) -> Session:
        """Return a session that a caller may look at.

        Raises:
            SessionNotFound: there is none, or it belongs to another key; a caller must not learn which.
        """
        session = await self._store.read(session_rows.find_live, session_id)
        if not caller.sees_all and not caller.sees(session.owner):
            raise SessionNotFound(session_id)
        return session

    async def find_own(self, session_id: str, caller: Caller) -> Session:
        """Return a session whose requests a caller may make: its own.

        Raises:
            SessionNotFound: there is none, or it belongs to another key.
            SessionsFull: it has as many exchanges as it may have.
        """
        session = await self._store.read(session_rows.find_with_room, session_id)
        if session.owner != caller.name:
            raise SessionNotFound(session_id)
        return session

    async def count(self, session: Session) -> SessionCounts:
        """Count the exchanges of a session."""
        await self._settle(session)
        return await self._store.read(session_rows.counts, session.id)

    async def delete(self, session: Session) -> None:
        """Delete a session with all that it has recorded, and end its requests on this node."""
        await self._store.write(session_rows.delete, session.id)
        missing = SessionNotFound(session.id)
        failure = RelayFailure(reason=missing.code, detail=str(missing))
        for request in [each for each in self._requests.queue.by_job.values() if each.posted.session == session.id]:
            self._requests.withdraw(request, failure)

    async def put_reward(self, session: Session, reward: Reward) -> bool:
        """Store the reward of a session, durable when this returns; return whether it is new.

        Raises:
            RewardConflict: there is another reward.
            SessionNotFound: it was deleted.
        """
        return await self._store.write(session_rows.put_reward, session, reward)

    # Exchanges

    async def add(self, session_id: str, posted: Asked, answer: Answer) -> int:
        """Store an exchange, durable when this returns; return its number.

        Raises:
            SessionNotFound: the session was deleted meanwhile.
            StoreUnavailable: the database is in trouble.
        """
        session, known = await self._store.read(session_rows.find_with_ends, session_id)
        recorded = answer.recorded[-1] if answer.recorded else None
        one = await anyio.to_thread.run_sync(lambda: pack_exchange(exchange_of(known, recorded, posted)))
        self._tokens.turns += 1
        self._tokens.partial += bool(one.exchange.partial)
        if not self._tokens.has_room(one.size):
            self._tokens.dropped += 1
            partial = (*one.exchange.partial, Lacking.STORE.value)
            one = PackedExchange(exchange=replace(one.exchange, partial=partial, end=None), tokens=None, messages=None)
        self._tokens.used += one.size
        marks = marks_in(posted.prompt)
        return await self._store.write(session_rows.add_exchange, session, one, marks)

    async def note_delivered(self, session_id: str, number: int) -> None:
        """Record that the client has an answer; while the database is in trouble the exchange stays uncertain."""
        with suppress(StoreUnavailable):
            await self._store.write(session_rows.make_certain, session_id, number)

    # Rows

    async def lines(self, session: Session, form: RolloutForm, *, is_partial: bool) -> list[bytes]:
        """Return the rollouts of a session so far as JSON lines; its chains may grow while it is used."""
        await self._settle(session)
        is_episode = form is RolloutForm.EPISODE
        found = await self._store.read(session_rows.exchanges, session.id, has_messages=is_episode)
        reward = await self._store.read(session_rows.reward, session.id)
        read = partial(self._lines_of, session, found, reward or Reward(), form, is_partial=is_partial)
        lines, outcomes = await anyio.to_thread.run_sync(read)
        self._tokens.rows.update(outcomes)
        return lines

    async def _settle(self, session: Session) -> None:
        """Wait a moment for answers that are on their way: their clients may have them before that is durable."""
        for _ in range(round(SETTLING_S / LOOK_S)):
            if not await self._store.read(session_rows.is_settling, session.id, SETTLING_S):
                return
            await anyio.sleep(LOOK_S)

    def _version_of_all(self, model: str, _agent: str) -> int | None:
        return self._version_of(model)

    def _lines_of(
        self, session: Session, found: Sequence[SessionExchange], reward: Reward, form: RolloutForm, *, is_partial: bool
    ) -> tuple[list[bytes], Counter[str]]:
        models = {each.number: each.model for each in found}
        place = RowPlace(job=session.id, conversation=CONVERSATION, state=STATE, first=1)
        outcomes: Counter[str] = Counter()
        kept = []
        for chain in chains_of_session(found):
            model = models[chain.rounds[-1]]
            for row, _ in rows_of(place, [chain], {"": reward}, partial(self._version_of_all, model)):
                numbered = replace(row, number=chain.number + 1)
                outcome = outcome_of(numbered, session.max_staleness, is_partial=is_partial)
                outcomes[outcome] += 1
                if outcome == DELIVERED:
                    kept.append((numbered, chain))
        if form is RolloutForm.ROWS or not kept:
            return [msgspec.json.encode(row) + b"\n" for row, _ in kept], outcomes
        first = found[0].messages[0] if found and found[0].messages else {}
        origin = EpisodeOrigin(job=session.id, name="session", conversation=CONVERSATION, prompt=text_of(first))
        episode = episode_of(origin, kept, texts_of_session(found), prompts_of_session(found))
        return [msgspec.json.encode(episode) + b"\n"], outcomes
