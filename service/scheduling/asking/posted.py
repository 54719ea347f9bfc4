"""The asking of a posted turn: a client's own body, whose answer is passed on as it comes or stored whole.

``service/scheduling/asking/composed.py`` asks turns that are composed from agents and words.
"""

from collections.abc import Callable
from typing import Final

from service.conversations.job.client_request import PostedRequest, WholeAnswer
from service.conversations.job.job import Agent, Conversation, Job, JobId, TurnKey
from service.conversations.job.until import Until
from service.conversations.record.transcript import UnfinishedTurn
from service.scheduling.attempt import RunningAttempt
from transport.dialects.frame_parts import FORMS
from transport.dialects.openai import CHAT_PATH, decode_whole
from transport.errors import EngineRejected, UnreadableFrame
from transport.events import Event, Finished, ReasoningDelta, RefusalDelta, TextDelta
from transport.relay import MAX_BODY_BYTES
from workers.notifier import Notifier
from workers.outcome import Completed, FailureReason, Outcome, RequestFailed
from workers.requests.answer import Answer
from workers.requests.generation import Generation
from workers.requests.halves import HalfAnswer, Pieces, fields_of
from workers.requests.relay import Relay
from workers.requests.sent import HeldFrames, SentStream
from workers.requests.slots import Lease
from workers.requests.stored_half import StoredHalf
from workers.supervised import SupervisedWorker

AGENT: Final = "request"  # one agent for all requests, so their costs are learned together
CONVERSATION: Final = "0"
OK: Final = 200
CHATS: Final = frozenset({CHAT_PATH, "/v1/completions"})  # paths whose answers are read as words
WORDS: Final = (TextDelta, ReasoningDelta, RefusalDelta, Finished)


def job_of(posted: PostedRequest, job_id: JobId) -> Job:
    """Return a request as a job of one turn, for the scheduling core."""
    params = {} if posted.most_tokens is None else {"max_tokens": posted.most_tokens}
    agent = Agent(
        id=AGENT,
        role=AGENT,
        model=posted.model,
        system="",
        adapter=posted.adapter,
        params=params,
        slots=posted.answers,
    )
    conversation = Conversation(id=CONVERSATION, prompt="", rounds=1, prompt_chars=posted.chars)
    return Job(
        id=job_id,
        name=posted.name,
        agents=(agent,),
        conversations=(conversation,),
        priority=posted.priority,
        owner=posted.owner,
    )


class HeldAsking(Pieces, frozen=True, kw_only=True):
    """A ``PostedAsking`` between two attempts: what its client has, in all and as pieces of words."""

    content_type: str | None
    sent: HeldFrames | None


class PostedAsking:
    """The requests of one posted turn; pieces of a stream are buffered until ``stream_to`` is called.

    ``changed`` is notified when a stream has begun. ``whole`` is the unstreamed answer of the newest attempt.
    """

    def __init__(self, job_id: JobId, posted: PostedRequest, changed: Notifier) -> None:
        self._job_id = job_id
        self._posted = posted
        self._changed = changed
        self.content_type: str | None = None  # the content type of a stream that has begun
        self.whole: WholeAnswer | None = None
        self.owes = False  # it has broken off, and nothing new was passed on since
        self.is_too_large = False  # more was buffered than is kept of an answer
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0
        self._write: Callable[[bytes], None] | None = None
        can_be_joined = posted.continues and posted.answers == 1 and posted.path in FORMS and posted.records is None
        self._sent = SentStream(posted.path) if can_be_joined else None  # what its client has of a stream
        self.broken: RequestFailed | None = None  # why its stream broke off
        self.half: HalfAnswer | None = None  # the part of a stream that its client has, and that another engine goes on

    def __repr__(self) -> str:
        return f"<PostedAsking {self._job_id} {self._posted.path}>"

    @property
    def has_begun(self) -> bool:
        """Whether a piece of a stream was passed on: another attempt can only go on from it."""
        return self.content_type is not None

    @property
    def shows_error(self) -> bool:
        """Whether its client may have an error of the engine's, in a stream that has begun."""
        if self._sent is not None:
            self._sent.catch_up()
        return self.has_begun and (self._sent is None or self._sent.fault is not None)

    async def run(self, attempt: RunningAttempt, on_slots_s: float, worker: SupervisedWorker, lease: Lease) -> Outcome:
        """Ask a worker, and give the slot back; earlier attempts took ``on_slots_s`` seconds."""
        with lease:
            return await worker.requests.perform(self.to_relay(attempt, on_slots_s), attempt.answer, attempt.request)

    @property
    def can_go_on(self) -> bool:
        """Whether another attempt can go on from what its client has."""
        return not self.has_begun or self.half is not None

    def hand_over(self) -> HeldAsking:
        """Return the state for the next program of this process."""
        half = self.half or HalfAnswer()
        return HeldAsking(
            content_type=self.content_type,
            sent=None if self._sent is None else self._sent.hand_over(),
            **fields_of(Pieces, half),
        )

    def take_over(self, held: HeldAsking) -> None:
        """Take over the state of an earlier program."""
        self.content_type = held.content_type
        if self._sent is not None and held.sent is not None:
            self._sent.take_over(held.sent)
        if held.content_type is not None:
            self.owes = True
            self.half = HalfAnswer(**fields_of(Pieces, held))

    def forget_answer(self) -> None:
        """Drop the answer of the last attempt: another begins, and no client has a part of it."""
        self.content_type = self.whole = None
        self._sent = None if self._sent is None else SentStream(self._posted.path)
        self.is_too_large = False
        self._take_buffered()

    def take_stream(self) -> WholeAnswer | None:
        """Return the buffered frames as one answer, None without any."""
        if self.content_type is None:
            return None
        return WholeAnswer(status=OK, content_type=self.content_type, body=self._take_buffered())

    def keep_half(self, answer: Answer) -> HalfAnswer | None:
        """Keep what the client has of a stream, for another attempt to go on with; None if it cannot go on."""
        self.owes = True
        if self._sent is not None:
            self._sent.catch_up()
        if self._sent is None or self._sent.fault is not None:
            self.half = None
        elif answer.was_asked:  # else it has the half of an earlier attempt
            generation = answer.generation
            text, reasoning = generation.pieces
            self.half = HalfAnswer(
                text=text,
                reasoning=reasoning,
                tokens=generation.word_tokens,
                first_version=answer.first_version,
                source=answer.source,
                fruitless=answer.half.fruitless,
            )
        return self.half

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Pass on a piece of the engine's stream."""
        if self.owes:
            self.owes = False
            self._changed.notify()
        if self._sent is not None:
            self._sent.add(frames)
        if self._write is not None:
            self._write(frames)
            return
        self._buffered_bytes += len(frames)
        self.is_too_large |= self._buffered_bytes > MAX_BODY_BYTES
        if not self.is_too_large:
            self._buffered.append(frames)
        if self.content_type is None:
            self.content_type = content_type
            self._changed.notify()

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Store the engine's answer until the end of the attempt says whether it counts."""
        self.whole = WholeAnswer(status=status, content_type=content_type, body=body)

    def stream_to(self, write: Callable[[bytes], None]) -> None:
        """Write pieces from now on, beginning with the buffered ones."""
        self._write = write
        if self._buffered:
            write(self._take_buffered())

    def _take_buffered(self) -> bytes:
        frames = b"".join(self._buffered)
        self._buffered.clear()
        self._buffered_bytes = 0
        return frames

    def to_relay(self, attempt: RunningAttempt, on_slots_s: float = 0.0) -> Relay:
        """Return the request for an engine; earlier attempts' seconds on slots reduce its limit.

        It is not stored: the two would refer to each other until garbage collection, with the body and the answer.
        """
        posted = self._posted
        return Relay(
            job_name=self._job_id,
            path=posted.path,
            body=posted.body,
            model=posted.name,
            adapter=posted.adapter,
            chars=posted.chars,
            is_streamed=posted.is_streamed,
            passage=self,
            limit_s=None if posted.limit_s is None else max(0.001, posted.limit_s - on_slots_s),
            cache_owner=posted.owner if posted.is_apart else None,
            owner=posted.owner,
            own_tokens=attempt.answer.own_tokens,
            most_tokens=None if posted.most_tokens is None else posted.most_tokens * posted.answers,
            half=self.half,
            broken=self.broken,
            sent=self._sent,
            records=posted.records,
        )


class RecordedAsking:
    """The asking of a recorded posted turn: its ``whole`` answer is stored, and each attempt starts over.

    It has the fields of ``ComposedAsking`` that a ``JobTurn`` reads.
    """

    prompt: Final = None  # the body is the prompt
    until: Final[Until] = ()
    fulfils: Final[tuple[int, ...]] = ()
    half: Final[HalfAnswer | None] = None
    kept: Final[StoredHalf | None] = None

    def __init__(self, key: TurnKey, posted: PostedRequest) -> None:
        self._key = key
        self._posted = posted
        self._asked = PostedAsking(key.job_id, posted, Notifier())
        self.whole: WholeAnswer | None = None

    def __repr__(self) -> str:
        return f"<RecordedAsking {self._key} {self._posted.path}>"

    def forget_attempt(self) -> None:
        """Forget the result of the previous attempt."""
        self.whole = None
        self._asked.forget_answer()

    def keep_half(self, attempt: RunningAttempt, reason: str) -> None:
        """Keep nothing: the next attempt starts over."""

    def restore(self, kept: StoredHalf) -> None:
        """Start over: a posted body has no stored half."""

    def half_so_far(self, attempt: RunningAttempt) -> None:
        """Return None: the next attempt starts over."""

    def take_fault(self) -> None:
        """Return no fault: the client judges the answer."""

    async def run(
        self, attempt: RunningAttempt, so_far: UnfinishedTurn, worker: SupervisedWorker, lease: Lease
    ) -> Outcome:
        """Ask a worker, and give the slot back."""
        attempt.answer.own_tokens = 0 if self._posted.is_apart else None
        attempt.request = worker.requests.prepare(self._key.job_id, attempt.answer)
        spent_s = sum((each.finished_at - each.started_at).total_seconds() for each in so_far.attempts)
        outcome = await self._asked.run(attempt, spent_s, worker, lease)
        if self._asked.is_too_large:
            detail = f"the answer is larger than {MAX_BODY_BYTES} bytes"
            return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=detail)
        self.whole = self._asked.take_stream() or self._asked.whole
        if isinstance(outcome, Completed):
            generation = attempt.answer.generation
            fault = None if self._asked.whole is None else _add_words(self._asked.whole.body, generation)
            is_chat = self._posted.path in CHATS
            if is_chat and self._asked.whole is None and not generation.finish_reason and worker.owns_engine:
                fault = "the stream ended before the engine had finished"
            if fault is not None and is_chat:
                return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=fault)
            # A relay ends an answer without a reason with an empty one; in a record that is a finding.
            generation.finish_reason = generation.finish_reason or None
        return outcome


def _add_words(body: bytes, generation: Generation) -> str | None:
    """Add the words of an unstreamed answer, of which only the cost was read; return why it has none, or None."""
    found: list[Event] = []
    try:
        decode_whole(body, found)
    except (UnreadableFrame, EngineRejected) as error:  # for other paths an answer such as a vector
        return f"the answer cannot be read: {error}"
    for event in found:
        if isinstance(event, WORDS):
            generation.receive(event)
    return None if found else "the answer has no words and no calls"
