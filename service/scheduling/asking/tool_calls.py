"""The journal of one attempt's tool calls: a record in the store before and after each call."""

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from service.conversations.job.job import TurnKey
from service.store.records import Record, StoredToolCall, ToolCallEnded, ToolCallStarted
from workers.errors import JournalClosed
from workers.tools.call_journal import Begun, Unverified
from workers.tools.calls import ToolRecord

EARLIER: Final = (
    "You began this turn before, and were interrupted or asked to answer again. "
    "These calls of tools were made then, and need not be made again:"
)
Append = Callable[[Sequence[Record]], Awaitable[bool]]


class TurnCalls:
    """The tool calls of one turn's attempt (``workers.tools.call_journal.CallJournal``).

    Calls are the same if they are the n-th with a name and arguments in their attempts. They then have the same key,
    whatever other calls the attempts make. ``append`` returns False if the facts were refused because another node runs
    the turn. ``kept`` are calls of an earlier attempt that this one goes on from.
    """

    def __init__(
        self, key: TurnKey, earlier: Sequence[StoredToolCall], append: Append, kept: Iterable[ToolRecord] = ()
    ) -> None:
        self._turn = key
        self._earlier = {call.call: call for call in earlier}
        self._numbers = len(earlier)
        self._append = append
        self._made: Counter[bytes] = Counter(_digest_of(each.name, each.arguments)[0] for each in kept)

    def __repr__(self) -> str:
        return f"<TurnCalls {self._turn} earlier={len(self._earlier)} made={self._made.total()}>"

    async def begin_call(self, name: str, arguments: Mapping[str, object], policy: Unverified) -> Begun:
        """Record a call before it is made; return its result if an earlier attempt has it.

        Raises:
            JournalClosed: another node runs this turn now.
        """
        what, encoded = _digest_of(name, arguments)
        self._made[what] += 1
        place = msgspec.json.encode([*self._turn, self._made[what]])
        key = hashlib.sha256(place + b"\0" + what).hexdigest()[:32]
        known = self._earlier.get(key)
        if known is not None and known.outcome is not None:
            result = msgspec.json.decode(known.outcome).get("result")
            if result is not None:
                return Begun(key=key, was_begun=True, result=result)
        self._numbers += known is None
        started = ToolCallStarted(
            key=self._turn,
            call=key,
            number=known.number if known else self._numbers,
            name=name,
            arguments=encoded.decode(),
            policy=policy.value,
            at=datetime.now(UTC),
        )
        await self._write(started)
        return Begun(key=key, was_begun=known is not None and known.outcome is None)

    async def end_call(self, key: str, *, result: str | None, failure: str | None) -> None:
        """Record the end of a call."""
        outcome = msgspec.json.encode({"result": result, "failure": failure}).decode()
        await self._write(ToolCallEnded(key=self._turn, call=key, outcome=outcome, at=datetime.now(UTC)))

    async def _write(self, record: Record) -> None:
        if not await self._append([record]):
            raise JournalClosed("another node runs this turn by now")


def _digest_of(name: str, arguments: object) -> tuple[bytes, bytes]:
    encoded = msgspec.json.encode(arguments, order="sorted")
    return name.encode() + b"\0" + encoded, encoded


def describe_calls(calls: Sequence[StoredToolCall]) -> str | None:
    """Describe the calls of a turn's earlier attempts for a model; None without calls."""
    if not calls:
        return None
    lines = [f"- {call.name}({call.arguments}): {_outcome(call)}" for call in calls]
    return "\n".join([EARLIER, *lines])


def _outcome(call: StoredToolCall) -> str:
    if call.outcome is None:
        return "whether it took effect is not known"
    outcome = msgspec.json.decode(call.outcome)
    return str(outcome["result"]) if outcome.get("result") is not None else f"it failed ({outcome.get('failure')})"
