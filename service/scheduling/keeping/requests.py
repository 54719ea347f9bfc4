"""All requests at the door that have not ended: a ``Work`` without records."""

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
from service.scheduling.keeping.request import AGAIN_S, HeldRequest, RelayedRequest, RelayFailure
from service.scheduling.keeping.request_queue import QueueRules, RequestQueue
from service.scheduling.work import RunCounters, Work
from service.store.records import Record
from workers.outcome import CancelReason, FailureReason
from workers.supervised import SupervisedWorker

REMEMBERED: Final = 16_384  # programs remembered; they take some 4 MB
PREFIX_BYTES: Final = 4
NO_RECORDS: Final[Sequence[Record]] = ()
FIRST_REQUEST: Final = events.ProgramReturn()  # the first request of a program
logger = logging.getLogger(__name__)


class AnsweredProgram(NamedTuple):
    """A program that was answered ``at`` a time: its request, and the place of its cache."""

    key: TurnKey
    place: CacheLocation
    at: float


class Programs:
    """The newest programs, each by a mark: a session's name, or a digest of everything it has said so far.

    Each has the worker of its last request, and the time of that answer in monotonic seconds.

    Source: specification, "Programs of clients".
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[bytes, AnsweredProgram] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Programs {len(self._known)}>"

    def find(self, marks: Sequence[bytes]) -> AnsweredProgram | None:
        """Return the program with the first of these marks that is known."""
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
    """The requests of clients; written by the scheduler in its own task. ``post`` hands events to the core.

    ``rules`` bound the requests that wait at once.
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
            f"request-{secrets.token_hex(PREFIX_BYTES)}"  # one for all: random bytes for each would cost a system call
        )
        self._numbers = count(1)
        self._closed_by: str | None = None
        self._on_end: Callable[[RequestMeasures], None] = lambda _: None

    def __repr__(self) -> str:
        return f"<RelayedRequests {self.queue!r}>"

    def __contains__(self, job_id: object) -> bool:
        """Whether a job of the core is a client's request."""
        return job_id in self._requests

    def __len__(self) -> int:
        """Count the requests that have not ended."""
        return len(self._requests)

    def subscribe(self, on_end: Callable[[RequestMeasures], None]) -> None:
        """Register ``on_end``, which gets the measures of each ended request; it must not wait."""
        self._on_end = on_end

    # Clients

    def submit(self, posted: PostedRequest, slots: int, held: HeldRequest | None = None) -> RelayedRequest:
        """Submit a request; the returned object shows its progress. ``slots`` are those of its model.

        ``held`` is its state in an earlier program of this process.

        Raises:
            QueueFull: too many requests or bytes wait, and most of them belong to the same key.
            ShuttingDown: no more requests are taken.
        """
        if self._closed_by is not None:
            raise ShuttingDown(f"{self._closed_by} and takes no new requests")
        for newest, failure in self.queue.make_room(posted, slots):
            self.withdraw(newest, failure)
        request = RelayedRequest(JobId(f"{self._prefix}{next(self._numbers):08x}"), posted, self._learn_from)
        if held is not None:
            request.take_over(held)
        self.queue.add(request)
        known = self._programs.find(posted.marks)
        cached = {} if known is None else {request.key: known.place}
        request.own_tokens = 0 if known is None else known.place.tokens
        # A request without marks has no program. One with several answers takes several slots.
        program = FIRST_REQUEST if posted.marks and posted.answers == 1 and self.queue.rules.holds_slots else None
        if program is not None and known is not None:
            pause_s = time.monotonic() - known.at
            program = events.ProgramReturn(last=known.key, pause_s=pause_s, known_tokens=known.place.tokens)
        self._post(events.JobAdmitted(job=request.job, cached=cached, program=program))
        return request

    def withdraw(self, request: RelayedRequest, failure: RelayFailure | None = None) -> None:
        """End a request whose client has left or whose time is over; its slot is free at once."""
        request.finish(failure or RelayFailure(reason=FailureReason.CANCELLED, detail="its client has gone"))
        if request.key.job_id in self._requests:
            self._post(events.JobCancelled(job_id=request.key.job_id))

    def end_waiting_for(self, models: Collection[str]) -> None:
        """End the requests that wait for models no longer served here: unlike jobs they cannot wait forever."""
        for request in [each for each in self._requests.values() if each.is_waiting and each.agent.model in models]:
            detail = f"model {request.agent.model} was removed from the configuration"
            self.withdraw(request, RelayFailure(reason=FailureReason.ENGINE_UNREACHABLE, detail=detail))

    def open(self) -> None:
        """Accept requests again."""
        self._closed_by = None

    def close(self, detail: str, *, keeps: bool = False) -> None:
        """Accept no more requests, and end the waiting ones: they are not recorded for the next life of the service.

        If it ``keeps`` those that can be handed over to the next program, new ones wait for it as well.
        """
        self._closed_by = None if keeps else detail
        waiting = [each for each in self._requests.values() if each.is_waiting]
        for request in [each for each in waiting if not (keeps and each.can_be_held)]:
            self.withdraw(request, RelayFailure(reason=FailureReason.SHUTDOWN, detail=detail, after_s=AGAIN_S))

    # Work

    @property
    @override
    def any_on_slot(self) -> bool:
        return bool(self._on_slots)

    def on_slots(self) -> list[RelayedRequest]:
        """Return the requests on slots."""
        return list(self._on_slots.values())

    def name_of(self, job_id: JobId) -> str:
        """Return the request's name in displays of turns: its path."""
        return self._requests[job_id].posted.path

    def owner_of(self, job_id: JobId) -> str | None:
        """Return the name of the key that the request came with."""
        return self._requests[job_id].posted.owner

    def agent_of(self, key: TurnKey) -> Agent:
        """Return the agent that stands for a client."""
        return self._requests[key.job_id].agent

    def place_of(self, key: TurnKey) -> int:  # noqa: ARG002 - its only agent has place 0
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
        """End the attempt of a request, unless it has just ended."""
        if key in self._on_slots:
            self._on_slots[key].attempt.cancel(CancelReason.CONVERSATION_ENDED)

    def interrupt_all(self, why: CancelReason) -> None:
        """End all running attempts; requests run again, unless their clients have a part that cannot go on."""
        for request in self._on_slots.values():
            request.attempt.cancel(why)

    def abandon(self, key: TurnKey, detail: str) -> Sequence[Record]:
        """Fail a request that waits for a model without workers."""
        self._blame.forget([key])
        failure = RelayFailure(reason=FailureReason.ENGINE_UNREACHABLE, detail=detail, after_s=AGAIN_S)
        self._requests[key.job_id].finish(failure)
        return NO_RECORDS

    def note_off_slot(self, key: TurnKey) -> None:
        """Remove a request from its slot."""
        self._on_slots.pop(key, None)

    def clear_charges(self, keys: Iterable[TurnKey]) -> None:
        """Clear requests of charges for deaths that another turn explains."""
        for key in keys:
            if key.job_id in self._requests:
                self._requests[key.job_id].charges = Charges()

    def move(self, action: events.Move, now: datetime) -> Iterable[Record]:  # noqa: ARG002
        """Handle the end of a request, or its release to other nodes, which ends it too."""
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
        """Forget requests that are over. The others wait on: no other node has them."""
        for request in [each for each in self._requests.values() if each.is_over]:
            self._end(self.queue.remove(request.key.job_id))

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
        """Log the end of a request."""
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
