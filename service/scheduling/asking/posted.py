"""A posted turn is asked: with a client's own body, whose answer is passed on as it comes.

A turn that is composed from agents and words is asked in ``service/scheduling/asking/composed.py``.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from service.conversations.job.job import Agent, Conversation, Job, JobId
from service.scheduling.attempt import RunningAttempt
from workers.notifier import Notifier
from workers.outcome import Outcome
from workers.requests.relay import Relay
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

AGENT: Final = "request"  # one for all: their costs are learned together
CONVERSATION: Final = "0"


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


class PostedAsking:
    """One posted turn's requests; pieces of a stream are held until ``stream_to`` says where they go.

    ``changed`` is notified when a stream has begun. ``whole`` is the unstreamed answer of the newest attempt.
    """

    def __init__(self, job_id: JobId, posted: PostedRequest, changed: Notifier) -> None:
        self._job_id = job_id
        self._posted = posted
        self._changed = changed
        self.content_type: str | None = None  # that of a stream that has begun
        self.whole: WholeAnswer | None = None
        self._buffered: list[bytes] = []
        self._write: Callable[[bytes], None] | None = None

    def __repr__(self) -> str:
        return f"<PostedAsking {self._job_id} {self._posted.path}>"

    @property
    def has_begun(self) -> bool:
        """Whether a piece of the answer was passed on: from then on no other attempt can take over."""
        return self.content_type is not None

    async def run(self, attempt: RunningAttempt, on_slots_s: float, worker: SupervisedWorker, lease: Lease) -> Outcome:
        """Ask a worker, and give the slot back; earlier attempts took ``on_slots_s`` seconds."""
        with lease:
            return await worker.requests.perform(self.to_relay(attempt, on_slots_s), attempt.answer, attempt.request)

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Pass on a piece of the engine's stream."""
        if self._write is not None:
            self._write(frames)
            return
        self._buffered.append(frames)
        if self.content_type is None:
            self.content_type = content_type
            self._changed.notify()

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Keep the engine's answer until the end of the attempt says whether it counts."""
        self.whole = WholeAnswer(status=status, content_type=content_type, body=body)

    def stream_to(self, write: Callable[[bytes], None]) -> None:
        """Write pieces from now on; the held ones go first."""
        self._write = write
        if self._buffered:
            write(b"".join(self._buffered))
            self._buffered.clear()

    def to_relay(self, attempt: RunningAttempt, on_slots_s: float = 0.0) -> Relay:
        """Return the request for an engine; its limit is less the seconds on slots so far.

        It is not kept: each would keep the other until the collector comes, with the body and the answer.
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
        )
