"""One request of a client: its state so far, and the effect of each end of an attempt. It is not recorded."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from typing_extensions import override

from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import Agent, JobId, TurnKey
from service.conversations.job.states import TurnState
from service.conversations.record.measures import AttemptMeasures, RequestMeasures
from service.conversations.record.transcript import Charges
from service.scheduling.asking.posted import AGENT, CONVERSATION, HeldAsking, PostedAsking, job_of
from service.scheduling.attempt import RunningAttempt, usage_key
from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.work import End, OnSlot
from service.store.records import Record, RequestUsed
from workers.notifier import Notifier
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.policy.continuation import Continuation
from workers.requests.slots import Lease
from workers.requests.tokens import logprobs_mode
from workers.supervised import SupervisedWorker

OVERLOADED: Final = frozenset({429, 503})  # statuses of an engine that would answer later
AGAIN_S: Final = 5  # seconds after which a client may retry a failure that it did not cause
AGAIN: Final = frozenset(
    {
        FailureReason.ENGINE_DIED,
        FailureReason.ENGINE_UNREACHABLE,
        FailureReason.CACHE_FULL,
        FailureReason.STALLED_PREFILL,
        FailureReason.STALLED_DECODE,
        FailureReason.WEIGHTS_CHANGED,
        FailureReason.SHUTDOWN,
        FailureReason.INTERNAL,
    }
)
SHUTDOWN: Final = Cancelled(reason=CancelReason.SHUTDOWN)
NEW_WEIGHTS: Final = Cancelled(reason=CancelReason.WEIGHTS)
REFUSED: Final = frozenset({FailureReason.ENGINE_REJECTED, FailureReason.CONTEXT_OVERFLOW})


class RelayFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a request has no complete answer; ``after_s`` is when a retry may help, None if it would not."""

    reason: str
    detail: str
    after_s: int | None = None


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits, or is between two attempts, for the next program of this process."""

    posted: PostedRequest
    attempts: int
    waited_s: float  # in queues so far
    on_slots_s: float
    asked: HeldAsking
    has_headers: bool = True
    keeps_alive: bool = True


class RelayedRequest(OnSlot):
    """A request in the queue or on a slot; written by ``RelayedRequests`` and the runner of its attempts.

    ``changed`` is notified when it gets or loses a slot, when its answer begins, and at its end. ``on_answer`` is
    called with it once its answer is complete. The task that answers its client reads it.
    """

    attempt: RunningAttempt  # the newest one

    def __init__(
        self, job_id: JobId, posted: PostedRequest, on_answer: Callable[["RelayedRequest"], None] = lambda _: None
    ) -> None:
        self._on_answer = on_answer
        self.posted = posted
        self.key = TurnKey(job_id, CONVERSATION, AGENT, 0)
        self.job = job_of(posted, job_id)  # for the core
        self.charges = Charges()
        self.own_tokens = 0  # prompt tokens that its program sent before
        self.attempts = 0
        self._was_asked = False  # by this program
        self.tries: list[AttemptMeasures] = []  # ended attempts
        self.posted_at = datetime.now(UTC)
        self.on_slots_s = 0.0  # slot time of ended attempts
        self.failure: RelayFailure | None = None
        self.is_over = False
        self.changed = Notifier()
        self.asked = PostedAsking(job_id, posted, self.changed)
        self._continuation = Continuation.ON
        self._is_proved = False  # the newest refusal concerns this request alone
        self._waiting_since: float | None = time.monotonic()
        self._waited_s = 0.0
        self.has_headers = False  # its client has those of a stream
        self.mode = ""  # the mode of its answer's logprobs, if they are recorded
        self.headers: Sequence[tuple[bytes, bytes]] = ()  # its client's
        self.is_followed = False  # by another on its connection, which has been read already
        self.keeps_alive = True  # the connection, in a program that takes it over

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
    def worker(self) -> str | None:
        """The worker of the newest attempt."""
        return self.attempt.worker if self._was_asked else None

    @property
    def waited_s(self) -> float:
        """The time that it has waited for slots so far, in seconds."""
        return self._waited_s + (time.monotonic() - self._waiting_since if self._waiting_since is not None else 0.0)

    # Handover to the next program of this process

    @property
    def can_be_held(self) -> bool:
        """Whether the next program can answer it, or go on with its stream."""
        can_go_on = not self.asked.has_begun or (self.posted.continues and self.asked.can_go_on)
        is_alone = not self.is_followed and (self.has_headers or not self._is_bound)
        return self.is_waiting and not self.is_over and can_go_on and is_alone

    @property
    def _is_bound(self) -> bool:
        """Whether only this program can begin its answer: with headers for a page of another origin."""
        return any(name == b"origin" for name, _ in self.headers)

    def hand_over(self) -> HeldRequest:
        """Return its state; it ``can_be_held``."""
        return HeldRequest(
            posted=self.posted,
            attempts=self.attempts,
            waited_s=self.waited_s,
            on_slots_s=self.on_slots_s,
            asked=self.asked.hand_over(),
            has_headers=self.has_headers,
            keeps_alive=not any(name == b"connection" and value.lower() == b"close" for name, value in self.headers),
        )

    def take_over(self, held: HeldRequest) -> None:
        """Take over its state from an earlier program."""
        self.attempts, self.has_headers, self.keeps_alive = held.attempts, held.has_headers, held.keeps_alive
        self._waited_s, self.on_slots_s = held.waited_s, held.on_slots_s
        self.asked.take_over(held.asked)

    # Moving

    def note_ready(self) -> None:
        """Start the waiting clock, unless it runs."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def begin_attempt(self, worker: SupervisedWorker) -> None:
        """Begin an attempt on a worker's slot."""
        self._waited_s, self._waiting_since = self.waited_s, None
        self.attempts, self._was_asked = self.attempts + 1, True
        slots = min(self.posted.answers, worker.slots.total)
        self.attempt = RunningAttempt(worker.spec.id, worker.now.incarnation, slots)
        self.attempt.answer.own_tokens = self.own_tokens if self.posted.is_apart else None
        self.asked.whole = None
        if self.posted.records is not None:
            self.mode = logprobs_mode(worker.spec.args)
        self._continuation, half = worker.spec.continuation, self.asked.half
        if half is not None and not worker.requests.may_go_on_with(half, self._continuation):
            self.asked.half = half = None
        if half is not None:
            self.attempt.answer.go_on_from(half)
        self.attempt.request = worker.requests.prepare(self.key.job_id, self.attempt.answer)
        self.changed.notify()

    def finish(self, failure: RelayFailure | None = None) -> None:
        """End the request, unless it has ended."""
        if self.is_over:
            return
        self._waited_s, self._waiting_since = self.waited_s, None
        self.failure, self.is_over = failure, True
        self.changed.notify()

    def lose_answer(self, failure: RelayFailure) -> None:
        """Let a request fail whose complete answer could not be stored."""
        self.failure = failure

    # On a slot

    @property
    def may_run_again(self) -> bool:
        """Whether it may run again: not if only this request is refused, or a begun stream cannot go on."""
        whole = self.asked.whole
        has_last_word = self._is_proved and whole is not None and whole.status not in OVERLOADED
        if self.asked.has_begun:
            return self.attempt.half is not None
        return not has_last_word

    @override
    async def run(self, worker: SupervisedWorker, lease: Lease) -> Outcome:
        if self.attempts > 1 and self.asked.has_begun and self.asked.half is None:
            with lease:
                detail = "its engine broke off, and the model has changed since"
                return RequestFailed(reason=FailureReason.WEIGHTS_CHANGED, detail=detail)
        return await self.asked.run(self.attempt, self.on_slots_s, worker, lease)

    @override
    def end_attempt(self, outcome: Outcome) -> None:
        self._is_proved = isinstance(outcome, EngineFailed) and outcome.is_proved
        self.attempt.end()
        self.on_slots_s += self.attempt.seconds
        if self.posted.continues and not isinstance(outcome, Completed) and self.asked.has_begun:
            is_changed = outcome == NEW_WEIGHTS and self._continuation is not Continuation.OVER_WEIGHTS
            if self._continuation is not Continuation.OFF and not is_changed and outcome != SHUTDOWN:
                self.attempt.half = self.asked.keep_half(self.attempt.answer)

    @override
    def complete(self) -> End:
        event = events.TurnCompleted(key=self.key, seconds=self.attempt.seconds, reading=self.attempt.reading)
        used = self._measure(TurnState.COMPLETED, None)
        self.finish()
        self._on_answer(self)
        return End(event=event, records=used)

    @override
    def run_again(self, reason: str, detail: str, trial: Trial | None) -> End:
        used = self._measure(TurnState.FAILED, reason)
        self.asked.broken = RequestFailed(reason=FailureReason(reason), detail=detail)
        self.note_ready()
        self.changed.notify()
        return End(event=events.TurnInterrupted(key=self.key, trial=trial), records=used)

    @override
    def fail(self, reason: FailureReason, detail: str) -> End:
        used = self._measure(TurnState.FAILED, reason)
        self.finish(RelayFailure(reason=reason, detail=detail, after_s=AGAIN_S if reason in AGAIN else None))
        return End(event=events.TurnFailed(key=self.key, reason=reason), records=used)

    @override
    def cut_off(self) -> End:
        used = self._measure(TurnState.CANCELLED, FailureReason.CANCELLED)
        self.finish(RelayFailure(reason=FailureReason.CANCELLED, detail="its client has gone, or waits no longer"))
        return End(event=events.TurnCutOff(key=self.key), records=used)

    def _measure(self, outcome: TurnState, reason: str | None) -> list[Record]:
        """Record the measures of the attempt; return the record of its usage."""
        measures = self.attempt.measures(self.posted.model, outcome, reason)
        self.tries.append(measures)
        return [RequestUsed(used=(usage_key(self.agent, self.posted.owner), measures.used))]

    @property
    def measures(self) -> RequestMeasures:
        """The measures of the request, once it is over."""
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
        """Whether the engine's own answer explains the failure."""
        return self.asked.whole is not None and self.was_told

    @property
    def was_told(self) -> bool:
        """Whether the engine itself has reported the failure, in its answer or in a stream."""
        return self.failure is not None and self.failure.reason in REFUSED
