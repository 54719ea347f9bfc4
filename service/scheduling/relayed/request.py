"""One request of a client: what was posted, and what has become of it so far."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from service.conversations.job import Agent, Conversation, Job, JobId, TurnKey
from service.conversations.measures import AttemptMeasures, RequestMeasures
from service.conversations.states import TurnState
from service.conversations.transcript import Charges
from workers.notifier import Notifier
from workers.outcome import FailureReason

AGENT: Final = "request"  # of every one: what they cost is learned together
CONVERSATION: Final = "0"
REFUSED: Final = frozenset({FailureReason.ENGINE_REJECTED, FailureReason.CONTEXT_OVERFLOW})


class PostedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's post: ``body`` for ``path``, of the ``model`` that it names, or of an ``adapter`` on that.

    ``name`` is what the body calls it, ``chars`` about how long its prompt is. ``answers`` is how many it asks for,
    ``most_tokens`` how long each may be.
    ``marks`` are what its program is known by, the surest first; the first is what it is known by afterwards.
    ``owner`` is the name of its key. ``limit_s`` bounds its time on slots, ``wait_s`` the time that it waits for them;
    None is for ever. ``trace_parent`` is the header of that name (W3C Trace Context), if it came. What is told of
    prompt caches ``is_apart`` from other keys.
    """

    path: str
    body: bytes
    name: str
    model: str
    adapter: str | None = None
    is_streamed: bool = False
    answers: int = 1
    most_tokens: int | None = None
    chars: int = 0
    priority: int = 0
    owner: str | None = None
    marks: Sequence[bytes] = ()
    limit_s: float | None = None
    wait_s: float | None = None
    trace_parent: str | None = None
    is_apart: bool = False

    def job(self, job_id: JobId) -> Job:
        """Return it as the scheduler's core knows it: a job of one turn."""
        params = {} if self.most_tokens is None else {"max_tokens": self.most_tokens}
        agent = Agent(
            id=AGENT,
            role=AGENT,
            model=self.model,
            system="",
            adapter=self.adapter,
            params=params,
            slots=self.answers,
        )
        conversation = Conversation(id=CONVERSATION, prompt="", rounds=1, prompt_chars=self.chars)
        return Job(
            id=job_id,
            name=self.name,
            agents=(agent,),
            conversations=(conversation,),
            priority=self.priority,
            owner=self.owner,
        )


class WholeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's unstreamed answer, good or bad."""

    status: int
    content_type: str
    body: bytes


class RelayFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request has no answer, or none that is whole; ``after_s`` is when it may be asked again, if that helps."""

    reason: str
    detail: str
    after_s: int | None = None


class RelayedRequest:
    """Written by its owner, ``RelayedRequests``, and by the attempt that runs; read where its client is answered.

    ``changed`` is notified when it gets a slot or loses it, when its answer begins, and at its end. Pieces of a stream
    are held until ``stream_to`` says where they go.
    """

    def __init__(self, job_id: JobId, posted: PostedRequest) -> None:
        self.posted = posted
        self.key = TurnKey(job_id, CONVERSATION, AGENT, 0)
        self.job = posted.job(job_id)  # as the core knows it
        self.charges = Charges()
        self.own_tokens = 0  # of its prompt that its program is known to have brought before
        self.worker: str | None = None  # of the newest attempt
        self.attempts = 0
        self.tries: list[AttemptMeasures] = []  # attempts that have ended
        self.posted_at = datetime.now(UTC)
        self.on_slots_s = 0.0  # of attempts that have ended
        self.content_type: str | None = None  # of a stream that has begun
        self.whole: WholeAnswer | None = None  # of the newest attempt
        self.failure: RelayFailure | None = None
        self.is_over = False
        self.changed = Notifier()
        self._waiting_since: float | None = time.monotonic()
        self._waited_s = 0.0
        self._buffered: list[bytes] = []
        self._write: Callable[[bytes], None] | None = None

    def __repr__(self) -> str:
        state = "over" if self.is_over else "waits" if self._waiting_since is not None else f"on {self.worker}"
        return f"<RelayedRequest {self.key.job_id} of {self.posted.model} {state}>"

    @property
    def agent(self) -> Agent:
        """The agent that stands for its client."""
        return self.job.agents[0]

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a slot."""
        return self._waiting_since is not None

    @property
    def waited_s(self) -> float:
        """For how long it has waited for slots so far, in all."""
        return self._waited_s + (time.monotonic() - self._waiting_since if self._waiting_since is not None else 0.0)

    @property
    def has_begun(self) -> bool:
        """Whether a piece of its answer was given on: from then on no other attempt can take over."""
        return self.content_type is not None

    @property
    def limit_left_s(self) -> float | None:
        """The seconds that it may still be on slots."""
        limit_s = self.posted.limit_s
        return None if limit_s is None else max(0.001, limit_s - self.on_slots_s)

    # Passage

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Give on a piece of the engine's stream."""
        if self._write is not None:
            self._write(frames)
            return
        self._buffered.append(frames)
        if self.content_type is None:
            self.content_type = content_type
            self.changed.notify()

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Keep the engine's answer until the end of the attempt says whether it counts."""
        self.whole = WholeAnswer(status=status, content_type=content_type, body=body)

    def stream_to(self, write: Callable[[bytes], None]) -> None:
        """Write pieces from now on; the held ones go first."""
        self._write = write
        if self._buffered:
            write(b"".join(self._buffered))
            self._buffered.clear()

    # Moving

    def note_ready(self) -> None:
        """Start the clock of waiting, unless it runs."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def note_start(self, worker: str) -> None:
        """Begin an attempt on a worker's slot."""
        self._waited_s, self._waiting_since = self.waited_s, None
        self.attempts += 1
        self.worker, self.whole = worker, None
        self.changed.notify()

    def finish(self, failure: RelayFailure | None = None) -> None:
        """End it."""
        self._waited_s, self._waiting_since = self.waited_s, None
        self.failure, self.is_over = failure, True
        self.changed.notify()

    @property
    def measures(self) -> RequestMeasures:
        """The measures of it, once it is over."""
        reason = None if self.failure is None else self.failure.reason
        failed = TurnState.CANCELLED if reason == FailureReason.CANCELLED else TurnState.FAILED
        return RequestMeasures(
            key=self.key,
            path=self.posted.path,
            model=self.posted.model,
            adapter=self.posted.adapter,
            outcome=TurnState.COMPLETED if reason is None else failed,
            reason=reason,
            began_at=self.posted_at,
            seconds=self.waited_s + self.on_slots_s,
            waited_s=self.waited_s,
            attempts=tuple(self.tries),
            trace_parent=self.posted.trace_parent,
        )

    @property
    def engine_refused(self) -> bool:
        """Whether the engine's own answer says why there is none."""
        return self.whole is not None and self.was_told

    @property
    def was_told(self) -> bool:
        """Whether the engine itself has said what is wrong: in its answer, or in a stream of it."""
        return self.failure is not None and self.failure.reason in REFUSED
