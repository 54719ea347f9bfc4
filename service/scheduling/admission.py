"""Admits jobs to the scheduler in pieces: one may make a million turns ready, and other work must not wait for it."""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from service.conversations.job.job import Job, JobId, Mode
from service.conversations.job.wording import ConversationWords
from service.conversations.record.log_fields import of_job
from service.conversations.record.transcript import Turn, UnfinishedTurn
from service.store.records import GivenUp, MemoryCut
from workers.log_context import line_about
from workers.notifier import Notifier

T = TypeVar("T", Turn, UnfinishedTurn, MemoryCut)
TURNS_AT_ONCE: Final = 1000  # turns; they take the event loop some 10 ms
SHOWN: Final = 10  # conversations named in one log line
logger = logging.getLogger(__name__)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations of a job that are stored and belong to this node, with their records.

    ``words`` are those of begun conversations. ``inherited`` holds the turns of source conversations, by the
    conversation that begins with them; heirs of one source share the sequence.
    """

    job: Job
    ended: Sequence[Turn] = ()
    inherited: Mapping[str, Sequence[Turn]] = msgspec.field(default_factory=dict)
    unfinished: Sequence[UnfinishedTurn] = ()
    words: Mapping[str, ConversationWords] = msgspec.field(default_factory=dict)
    is_cancelled: bool = False
    cuts: Sequence[MemoryCut] = ()
    given_up: Sequence[GivenUp] = ()

    def without_claimed_twice(self, new: Collection[str]) -> "Piece":
        """Return the piece with only its ``new`` conversations: the claim also named some that already run here."""
        here = [each.id for each in self.job.conversations if each.id not in new]
        shown, line = ", ".join(here[:SHOWN]), line_about(of_job(self.job.id))
        text = "job %s: %d conversations were claimed while they run here, and go on as they are: %s"
        logger.warning(text, self.job.id, len(here), shown, extra=line)
        return replace(
            self,
            job=replace(self.job, conversations=tuple(each for each in self.job.conversations if each.id in new)),
            ended=[turn for turn in self.ended if turn.key.conversation_id in new],
            inherited={name: turns for name, turns in self.inherited.items() if name in new},
            unfinished=[turn for turn in self.unfinished if turn.key.conversation_id in new],
            words={name: words for name, words in self.words.items() if name in new},
            cuts=[cut for cut in self.cuts if cut.key.conversation_id in new],
        )


class Admission:
    """Admits jobs piece by piece; owned by the scheduler. The remaining pieces of a job wait here, in order.

    ``admit`` takes a piece at once. ``settle`` returns when all facts so far are durable.
    """

    def __init__(
        self,
        admit: Callable[[Piece], None],
        settle: Callable[[], Awaitable[object]],
        start_soon: Callable[[Callable[[], Coroutine[object, object, None]]], None],
    ) -> None:
        self._admit = admit
        self._settle = settle
        self._start_soon = start_soon
        self._left: dict[JobId, deque[Piece]] = {}
        self._cancelled: set[JobId] = set()
        self._done = Notifier()

    def __repr__(self) -> str:
        return f"<Admission jobs={len(self._left)}>"

    def admit_piece(self, whole: Piece) -> None:
        """Admit a piece, or as much of it as fits at once; the rest follows later."""
        job_id, pieces = whole.job.id, _pieces_of(whole)
        if job_id in self._left:  # after the remaining pieces of the job
            self._left[job_id].extend(pieces)
            return
        self._admit(next(pieces))
        left = deque(pieces)
        if left:
            self._left[job_id] = left
            self._start_soon(partial(self._go_on, job_id, left))

    def without_known(self, piece: Piece, here: Collection[str]) -> Piece | None:
        """Return the conversations of a piece that neither run nor wait here; None without any."""
        waiting = {each.id for left in self._left.get(piece.job.id, ()) for each in left.job.conversations}
        new = {each.id for each in piece.job.conversations if each.id not in waiting and each.id not in here}
        if len(new) < len(piece.job.conversations):
            piece = piece.without_claimed_twice(new)
        return piece if new else None

    def cancel(self, job_id: JobId) -> None:
        """Cancel the part of a job that is not admitted yet."""
        if job_id in self._left:
            self._cancelled.add(job_id)

    def clear(self) -> None:
        """Forget the remaining pieces: they belong to another node."""
        self._left.clear()
        self._cancelled.clear()
        self._done.notify()

    async def wait_done(self) -> None:
        """Return when no piece remains."""
        await self._done.wait_until(lambda: not self._left)

    async def _go_on(self, job_id: JobId, left: deque[Piece]) -> None:
        while left:
            await self._settle()
            if self._left.get(job_id) is not left:
                return
            piece = left.popleft()
            self._admit(replace(piece, is_cancelled=piece.is_cancelled or job_id in self._cancelled))
        del self._left[job_id]
        self._cancelled.discard(job_id)
        self._done.notify()


def _pieces_of(whole: Piece) -> Iterator[Piece]:
    job = whole.job
    rounds = max((conversation.rounds for conversation in job.conversations), default=1) if job.mode is Mode.FREE else 1
    inherited = max((each.heritage.turns for each in job.conversations), default=0)
    count = max(1, TURNS_AT_ONCE // (len(job.agents) * rounds + inherited))
    if count >= len(job.conversations):
        yield whole
        return
    ended, unfinished = _by_conversation(whole.ended), _by_conversation(whole.unfinished)
    cuts = _by_conversation(whole.cuts)
    for begin in range(0, len(job.conversations), count):
        conversations = job.conversations[begin : begin + count]
        yield Piece(
            job=replace(job, conversations=conversations),
            ended=[turn for conversation in conversations for turn in ended.get(conversation.id, ())],
            inherited={each.id: whole.inherited[each.id] for each in conversations if each.id in whole.inherited},
            unfinished=[turn for conversation in conversations for turn in unfinished.get(conversation.id, ())],
            words=whole.words,
            is_cancelled=whole.is_cancelled,
            given_up=whole.given_up,
            cuts=[cut for conversation in conversations for cut in cuts.get(conversation.id, ())],
        )


def _by_conversation(turns: Sequence[T]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for turn in turns:
        found.setdefault(turn.key.conversation_id, []).append(turn)
    return found
