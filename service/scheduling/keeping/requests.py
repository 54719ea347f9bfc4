"""All requests at the door that have not ended: a ``Work`` of which nothing is stored."""

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from itertools import count
from typing import Final, NamedTuple

from typing_extensions import override

from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import Agent, JobId, TurnKey
from service.conversations.record.measures import RequestMeasures
from service.conversations.record.transcript import Charges
from service.errors import ShuttingDown
from service.scheduling.core import events
from service.scheduling.core.blame import Blame
from service.scheduling.core.queue.affinity import CacheLocation
from service.scheduling.keeping.request import AGAIN_S, RelayedRequest, RelayFailure
from service.scheduling.keeping.request_queue import QueueRules, RequestQueue
from service.scheduling.work import RunCounters, Work
from service.store.records import Record
from workers.outcome import CancelReason, FailureReason
from workers.supervised import SupervisedWorker

REMEMBERED: Final = 16_384  # programs; some 4 MB
PREFIX_BYTES: Final = 4
NO_RECORDS: Final[Sequence[Record]] = ()
FIRST_REQUEST: Final = events.ProgramReturn()  # of a program
logger = logging.getLogger(__name__)


class AnsweredProgram(NamedTuple):
    """A program that was answered ``at`` a time: the request, and where its cache is."""

    key: TurnKey
    place: CacheLocation
    at: float


class Programs:
    """The newest programs, each by what it is known by: a session's name, or a digest of all that it has said so far.

    Of each there is where its last request was, and when that was answered, in monotonic seconds.

    Source: specification, "Programs of clients".
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[bytes, AnsweredProgram] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Programs {len(self._known)}>"

    def find(self, marks: Sequence[bytes]) -> AnsweredProgram | None:
        """Return the program that is known by the first of these marks that any is known by."""
        for mark in marks:
            program = self._known.get(mark)
            if program is not None:
                self._known.move_to_end(mark)
                return program
        return None

    def note(self, mark: bytes, program: AnsweredProgram) -> None:
        """Record an answer of a program."""
        self._known[mark] = program
        self._known.move_to_end(mark)
        if len(self._known) > self._most:
            self._known.popitem(last=False)


class RelayedRequests(Work):
    """Written by the scheduler, in whose task all of it runs; ``post`` hands events to the core.

    ``rules`` bound what waits at once.
    """

    def __init__(
        self,
        blame: Blame,
        counters: RunCounters,
        post: Callable[[events.Event], None],
        rules: QueueRules,
    ) -> None:
        self._blame = blame
        self._counters = counters
        self._post = post
        self.queue = RequestQueue(rules)
        self._requests = self.queue.by_job
        self._on_slots = self.queue.on_slots
        self._programs = Programs()
        self._prefix = (
            f"request-{secrets.token_hex(PREFIX_BYTES)}"  # random bytes of each would be a call of the kernel
        )
        self._numbers = count(1)
        self._closed_by: str | None = None
        self._on_end: Callable[[RequestMeasures], None] = lambda _: None

    def __repr__(self) -> str:
        return f"<RelayedRequests {self.queue!r}>"

    def __contains__(self, job_id: object) -> bool:
        """Tell whether a job of the core's is a request of a client."""
        return job_id in self._requests

    def __len__(self) -> int:
        """Count those that have not ended."""
        return len(self._requests)

    def subscribe(self, on_end: Callable[[RequestMeasures], None]) -> None:
        """Register ``on_end``, which gets the measures of each ended request; it must not wait."""
        self._on_end = on_end

    # Clients

    def submit(self, posted: PostedRequest, slots: int) -> RelayedRequest:
        """Take a request; what becomes of it shows in what is returned. ``slots`` are those of its model.

        Raises:
            QueueFull: too many wait, or too much, and most of that is of the same key.
            ShuttingDown: no more are taken.
        """
        if self._closed_by is not None:
            raise ShuttingDown(f"{self._closed_by} and takes no new requests")
        for newest, failure in self.queue.make_room(posted, slots):
            self.withdraw(newest, failure)
        request = RelayedRequest(JobId(f"{self._prefix}{next(self._numbers):08x}"), posted, self._learn_from)
        self.queue.add(request)
        known = self._programs.find(posted.marks)
        cached = {} if known is None else {request.key: known.place}
        request.own_tokens = 0 if known is None else known.place.tokens
        # Without marks it has no program; one of several answers has several slots.
        program = FIRST_REQUEST if posted.marks and posted.answers == 1 and self.queue.rules.holds_slots else None
        if program is not None and known is not None:
            pause_s = time.monotonic() - known.at
            program = events.ProgramReturn(last=known.key, pause_s=pause_s, known_tokens=known.place.tokens)
        self._post(events.JobAdmitted(job=request.job, cached=cached, program=program))
        return request

    def withdraw(self, request: RelayedRequest, failure: RelayFailure | None = None) -> None:
        """End a request that nobody waits for any more, or for which time is up; its slot is free at once."""
        request.finish(failure or RelayFailure(reason=FailureReason.CANCELLED, detail="its client has gone"))
        if request.key.job_id in self._requests:
            self._post(events.JobCancelled(job_id=request.key.job_id))

    def end_waiting_for(self, models: Collection[str]) -> None:
        """End those that wait for models which are served here no more: unlike jobs they cannot wait for ever."""
        for request in [each for each in self._requests.values() if each.is_waiting and each.agent.model in models]:
            detail = f"model {request.agent.model} was removed from the configuration"
            self.withdraw(request, RelayFailure(reason=FailureReason.ENGINE_UNREACHABLE, detail=detail))

    def open(self) -> None:
        """Take requests again."""
        self._closed_by = None

    def close(self, detail: str) -> None:
        """Take no more, and end those that wait: another start of the service knows nothing of them."""
        self._closed_by = detail
        for request in [each for each in self._requests.values() if each.is_waiting]:
            self.withdraw(request, RelayFailure(reason=FailureReason.SHUTDOWN, detail=detail, after_s=AGAIN_S))

    # Work

    @property
    @override
    def any_on_slot(self) -> bool:
        return bool(self._on_slots)

    def on_slots(self) -> list[RelayedRequest]:
        """Return the requests that are on slots now."""
        return list(self._on_slots.values())

    def name_of(self, job_id: JobId) -> str:
        """Return the name of the request for displays of turns: its path."""
        return self._requests[job_id].posted.path

    def owner_of(self, job_id: JobId) -> str | None:
        """Return the name of the key that the request came with."""
        return self._requests[job_id].posted.owner

    def agent_of(self, key: TurnKey) -> Agent:
        """Return the agent that stands for a client."""
        return self._requests[key.job_id].agent

    def place_of(self, key: TurnKey) -> int:  # noqa: ARG002 - it has no others beside it
        """Return the agent's place."""
        return 0

    def note_ready(self, key: TurnKey, now: datetime) -> Sequence[Record]:  # noqa: ARG002
        """Let a request wait for a slot."""
        self._requests[key.job_id].note_ready()
        return NO_RECORDS

    @override
    def begin_attempt(
        self,
        key: TurnKey,
        worker: SupervisedWorker,
        now: datetime,
    ) -> tuple[RelayedRequest, Sequence[Record]]:
        request = self._on_slots[key] = self._requests[key.job_id]
        request.begin_attempt(worker)
        return request, NO_RECORDS

    def cut_off_attempt(self, key: TurnKey) -> None:
        """End the attempt of a request, unless it has ended at the same moment."""
        if key in self._on_slots:
            self._on_slots[key].attempt.cancel(CancelReason.CONVERSATION_ENDED)

    def interrupt_all(self) -> None:
        """End every attempt; the request runs again, unless its client has a part of its answer."""
        for request in self._on_slots.values():
            request.attempt.cancel(CancelReason.LEASE_LOST)

    def abandon(self, key: TurnKey, detail: str) -> Sequence[Record]:
        """Fail a request that waits for what cannot come."""
        self._blame.forget([key])
        failure = RelayFailure(reason=FailureReason.ENGINE_UNREACHABLE, detail=detail, after_s=AGAIN_S)
        self._requests[key.job_id].finish(failure)
        return NO_RECORDS

    def note_off_slot(self, key: TurnKey) -> None:
        """Take a request off its slot."""
        self._on_slots.pop(key, None)

    def clear_charges(self, keys: Iterable[TurnKey]) -> None:
        """Clear requests of their charges for deaths that another turn explains."""
        for key in keys:
            if key.job_id in self._requests:
                self._requests[key.job_id].charges = Charges()

    def move(self, action: events.Move, now: datetime) -> Iterable[Record]:  # noqa: ARG002
        """Take the end of a request, or that only another node could go on with it."""
        match action:
            case events.ConversationEnded():
                self._blame.forget(action.unspoken)
            case events.ConversationReleased():
                request = self._requests[action.job_id]
                detail = f"no worker of {request.posted.model} here will be ready; another node has one"
                request.finish(RelayFailure(reason=FailureReason.ENGINE_UNREACHABLE, detail=detail, after_s=AGAIN_S))
                self._blame.forget([request.key])
            case events.JobEnded():
                self._end(self.queue.remove(action.job_id))
                self._blame.forget_job(action.job_id)
            case events.ConversationStarted():
                pass
        return NO_RECORDS

    def clear(self) -> None:
        """End all: this node was taken for dead, and begins anew."""
        for request in self._requests.values():
            detail = "this node was taken for dead, and has begun anew"
            request.finish(RelayFailure(reason=FailureReason.SHUTDOWN, detail=detail, after_s=AGAIN_S))
        self.queue.clear()

    def _learn_from(self, request: RelayedRequest) -> None:
        """Learn from a complete answer."""
        attempt, reading = request.attempt, request.attempt.reading
        if request.failure is not None or reading is None:
            return
        self.queue.pace.add(request.on_slots_s)
        marks = request.posted.marks
        known = self._programs.find(marks)
        if known is not None and attempt.answer.usage is not None:
            self._counters.reusable_tokens += known.place.tokens
            self._counters.reused_tokens += min(known.place.tokens, attempt.answer.usage.cached_tokens)
        if marks:
            place = CacheLocation(worker=attempt.worker, tokens=reading.context_tokens)
            self._programs.note(marks[0], AnsweredProgram(request.key, place, time.monotonic()))

    def _end(self, request: RelayedRequest) -> None:
        """Log what became of a request that is over."""
        request.finish(RelayFailure(reason=FailureReason.CANCELLED, detail="it was cancelled"))
        self._on_end(request.measures)
        failure = request.failure
        logger.debug(
            "%s of %s: %s, %d attempts, waited %.3f s",
            request.key.job_id,
            request.posted.path,
            failure.reason if failure is not None else "completed",
            request.attempts,
            request.waited_s,
        )
