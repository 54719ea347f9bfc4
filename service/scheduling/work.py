"""The scheduler's two works (turns of jobs, requests at the door), and the store of its facts.

The core only knows keys, agents and models. A key belongs to the ``Work`` of its job, and is an ``OnSlot`` while it is
on a slot, for both kinds.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Protocol

import msgspec

from service.conversations.job.job import Agent, JobId, TurnKey
from service.conversations.record.transcript import Charges
from service.scheduling.attempt import RunningAttempt
from service.scheduling.core import events
from service.scheduling.core.blame import Finding, Trial
from service.store.records import Record, StoredToolCall
from workers.outcome import CancelReason, FailureReason, Outcome
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker


class RunCounters:
    """Counts since the start; written by the scheduler alone.

    Conversations that were admitted, have ended, and have ended durably; ended turns of jobs; tokens that engines could
    have taken from their caches, and those that they took; faults found by the check of the core.
    """

    def __init__(self) -> None:
        self.conversations = 0
        self.finished = 0
        self.persisted = 0
        self.ended_turns = 0
        self.reusable_tokens = 0
        self.reused_tokens = 0
        self.integrity_faults = 0

    def note_ended(self, turns: int, conversations: int) -> None:
        """Count ended turns and conversations."""
        self.ended_turns += turns
        self.finished += conversations

    def __repr__(self) -> str:
        return f"<RunCounters conversations={self.finished}/{self.conversations}>"


class Pause(StrEnum):
    """The reason why no turn starts."""

    CLOSING = "closing"
    STORE = "store"  # facts cannot be written
    UPGRADE = "upgrade"  # the next program of this process goes on
    LEASE = "lease"  # another node may take over at any moment


class SchedulerStore(Protocol):
    """The store of the scheduler's facts, and of conversations that leave it."""

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Write facts that belong together, in order; call ``on_durable`` when they are durable."""

    async def append(self, records: Sequence[Record]) -> bool:
        """Write facts, and return when they are durable; False if another node's turns were refused."""

    async def calls_of(self, key: TurnKey) -> Sequence[StoredToolCall]:
        """Return the tool calls that a turn has begun, in any attempt."""

    def release_nowait(self, released: Sequence[events.ConversationReleased]) -> None:
        """Release conversations to other nodes, or to none until a caller has spoken."""

    def is_followed(self, job_id: JobId) -> bool:
        """Whether a client follows a job while it runs, so that its text must be streamed."""

    def is_elsewhere(self, model: str) -> bool:
        """Whether another node has workers for a model."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The consequences of one attempt's end."""

    event: events.TurnEvent
    records: Sequence[Record] = ()
    findings: Sequence[Finding] = ()


class OnSlot(Protocol):
    """One turn on a slot, with its running attempt and its charges."""

    key: TurnKey
    charges: Charges
    attempt: RunningAttempt

    @property
    def may_run_again(self) -> bool:
        """Whether another attempt could still replace this one for its caller."""

    async def run(self, worker: SupervisedWorker, lease: Lease) -> Outcome:
        """Ask the worker, and give the slot back; every end is returned as a value."""

    def end_attempt(self, outcome: Outcome) -> None:
        """Record the results of the attempt, whatever its end."""

    def complete(self) -> End:
        """Complete the turn with its answer."""

    def run_again(self, reason: str, detail: str, trial: Trial | None) -> End:
        """Let the turn wait for another slot, here or in the next life of the service."""

    def fail(self, reason: FailureReason, detail: str) -> End:
        """Fail the turn."""

    def cut_off(self) -> End:
        """End the turn because its conversation has ended."""


class Work(Protocol):
    """The owner of the turns of some jobs; only the scheduler calls it, and no method waits."""

    @property
    def any_on_slot(self) -> bool:
        """Whether a slot is taken."""

    def on_slots(self) -> Iterable[OnSlot]:
        """Return the turns on slots."""

    def name_of(self, job_id: JobId) -> str:
        """Return the caller's name of a job that has not ended."""

    def owner_of(self, job_id: JobId) -> str | None:
        """Return the name of the key that posted an unfinished job."""

    def agent_of(self, key: TurnKey) -> Agent:
        """Return the agent of a turn."""

    def place_of(self, key: TurnKey) -> int:
        """Return the agent's place among those of its job."""

    def note_ready(self, key: TurnKey, now: datetime) -> Sequence[Record]:
        """Let a turn wait for a slot; return the records of that."""

    def begin_attempt(self, key: TurnKey, worker: SupervisedWorker, now: datetime) -> tuple[OnSlot, Sequence[Record]]:
        """Begin an attempt on a worker."""

    def cut_off_attempt(self, key: TurnKey) -> None:
        """End the attempt of a turn; if it has just ended, its own end follows."""

    def interrupt_all(self, why: CancelReason) -> None:
        """End all running attempts; their turns run again."""

    def abandon(self, key: TurnKey, detail: str) -> Sequence[Record]:
        """Fail a turn that waits for a model without workers."""

    def note_off_slot(self, key: TurnKey) -> None:
        """Remove a turn from its slot."""

    def clear_charges(self, keys: Iterable[TurnKey]) -> None:
        """Clear turns of charges for deaths that another turn explains."""

    def move(self, action: events.Move, now: datetime) -> Iterable[Record]:
        """Apply a move of a conversation or a job; return its records, made on demand."""

    def clear(self) -> None:
        """Forget everything; no turn is on a slot."""
