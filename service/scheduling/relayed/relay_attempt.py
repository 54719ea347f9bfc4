"""A relayed request on a slot."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from service.conversations.states import TurnState
from service.conversations.transcript import Charges
from service.scheduling.attempt_usage import AttemptPlace, measures_of, used_by
from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.core.queue.affinity import PromptReading
from service.scheduling.relayed.request import AGENT, RelayedRequest, RelayFailure
from service.scheduling.work import End
from service.store.records import Record, RequestUsed, UsageKey
from workers.outcome import Cancelled, CancelReason, EngineFailed, FailureReason, Outcome
from workers.requests.answer import Answer
from workers.requests.relay import Relay
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

OVERLOADED: Final = frozenset({429, 503})  # what an engine says that would answer later
AGAIN_S: Final = 5  # after which a client may ask again what failed for no fault of its own

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


class RelayAttempt:
    """An ``OnSlot`` over a relayed request; ``on_end`` is told when the request itself is over."""

    def __init__(
        self,
        request: RelayedRequest,
        worker: SupervisedWorker,
        on_end: Callable[[RelayedRequest, "RelayAttempt"], None],
    ) -> None:
        self._request = request
        self.key = request.key
        self.worker = worker.spec.id
        self.incarnation = worker.incarnation
        self._on_end = on_end
        self.answer = Answer(time.monotonic)
        self.answer.own_tokens = request.own_tokens if request.posted.is_apart else None
        self._relay = relay_of(request)
        self._in_flight = worker.prepare(self._relay, self.answer)
        self._began_at = time.monotonic()
        self._started_at = datetime.now(UTC)
        self.seconds = 0.0
        self._slots = min(request.posted.answers, worker.slots)
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"<RelayAttempt {self._request!r} {self.answer!r}>"

    @property
    def charges(self) -> Charges:
        """The charges of the request."""
        return self._request.charges

    @charges.setter
    def charges(self, charges: Charges) -> None:
        self._request.charges = charges

    @property
    def may_run_again(self) -> bool:
        """Unless its client has a part of the answer, or the engine refuses this request alone: its word counts."""
        is_proved = isinstance(self._outcome, EngineFailed) and self._outcome.is_proved
        whole = self._request.whole
        has_last_word = is_proved and whole is not None and whole.status not in OVERLOADED
        return not (self._request.has_begun or has_last_word)

    async def run(self, worker: SupervisedWorker, lease: Lease) -> Outcome:
        """Ask the worker, and give the slot back."""
        with lease:
            return await worker.perform(self._relay, self.answer, self._in_flight)

    def cancel(self, reason: CancelReason) -> None:
        """End it, unless it has ended at this moment."""
        self._in_flight.end(Cancelled(reason=reason))

    @property
    def reading(self) -> PromptReading | None:
        """The engine's reading, as far as it has told."""
        generation = self.answer.generation
        if generation.usage is None:
            return None
        usage, asked_at = generation.usage, generation.started_at
        first_at = generation.first_token_at
        return PromptReading(
            # Without a first token of its own nobody knows how long the reading took.
            fresh_tokens=usage.prompt_tokens - usage.cached_tokens if first_at is not None else 0,
            seconds=max(0.0, first_at - asked_at) if first_at is not None else 0.0,
            context_tokens=usage.prompt_tokens + usage.completion_tokens,
            answer_tokens=usage.completion_tokens,
            answer_s=max(0.0, generation.last_progress_at - first_at) if first_at is not None else 0.0,
        )

    # Ending

    def end_attempt(self, outcome: Outcome) -> None:
        """Keep what the attempt has brought."""
        self._outcome = outcome
        self.seconds = time.monotonic() - self._began_at
        self._request.on_slots_s += self.seconds

    def complete(self) -> End:
        """Take a complete answer."""
        used = self._used(TurnState.COMPLETED, None)
        self._finish(None)
        event = events.TurnCompleted(key=self.key, seconds=self.seconds, reading=self.reading)
        return End(event=event, records=used)

    def run_again(self, reason: str, detail: str, trial: Trial | None) -> End:  # noqa: ARG002 - its caller is not told
        """Wait for another slot."""
        used = self._used(TurnState.FAILED, reason)
        self._request.note_ready()
        self._request.changed.notify()
        return End(event=events.TurnInterrupted(key=self.key, trial=trial), records=used)

    def fail(self, reason: FailureReason, detail: str) -> End:
        """End with a failure."""
        used = self._used(TurnState.FAILED, reason)
        self._finish(RelayFailure(reason=reason, detail=detail, after_s=AGAIN_S if reason in AGAIN else None))
        return End(event=events.TurnFailed(key=self.key, reason=reason), records=used)

    def cut_off(self) -> End:
        """End, since nobody waits for it any more."""
        used = self._used(TurnState.CANCELLED, FailureReason.CANCELLED)
        self._finish(RelayFailure(reason=FailureReason.CANCELLED, detail="its client has gone, or waits no longer"))
        return End(event=events.TurnCutOff(key=self.key), records=used)

    def _used(self, outcome: TurnState, reason: str | None) -> list[Record]:
        """Measure the attempt; return the record of its usage."""
        posted = self._request.posted
        whose = UsageKey(
            day=datetime.now(UTC).date().isoformat(),
            key_name=posted.owner or "",
            job_id="",
            agent=AGENT,
            model=posted.model,
        )
        used = used_by(whose, self.answer, self._slots * self.seconds, stands=outcome is TurnState.COMPLETED)
        place = AttemptPlace(
            worker=self.worker,
            incarnation=self.incarnation,
            began_at=self._started_at,
            began_s=self._began_at,
        )
        self._request.tries.append(measures_of(place, self.answer, used, outcome, reason))
        return [RequestUsed(used=used)]

    def _finish(self, failure: RelayFailure | None) -> None:
        if not self._request.is_over:
            self._request.finish(failure)
        self._on_end(self._request, self)


def relay_of(request: RelayedRequest) -> Relay:
    """Return a request as its engine is asked on a slot."""
    posted = request.posted
    return Relay(
        job_name=request.key.job_id,
        path=posted.path,
        body=posted.body,
        model=posted.name,
        adapter=posted.adapter,
        chars=posted.chars,
        is_streamed=posted.is_streamed,
        passage=request,
        limit_s=request.limit_left_s,
        cache_owner=posted.owner if posted.is_apart else None,
        own_tokens=request.own_tokens if posted.is_apart else None,
        most_tokens=None if posted.most_tokens is None else posted.most_tokens * posted.answers,
    )
