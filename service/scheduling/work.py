"""The scheduler's two sides: its works (turns of jobs, requests at the door), and the store of its facts.

The core knows keys, agents and models alone. A key is taken to the ``Work`` that its job is of, and while it is on a
slot it is an ``OnSlot``, whichever of the two it is.
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
from workers.outcome import FailureReason, Outcome
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker


class RunCounters:
    """Written by the scheduler alone; counts since the start.

    Conversations that were taken up, have ended, and are durably so; turns of jobs that have ended; tokens that engines
    could have taken from their caches, and those that they report to have; faults that the check of the core has found.
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
    """Why nothing is started."""

    CLOSING = "closing"
    STORE = "store"  # what has happened cannot be written
    UPGRADE = "upgrade"  # the next program of this process goes on
    LEASE = "lease"  # another node may take over at any moment


class SchedulerStore(Protocol):
    """The store of the scheduler's facts, and of conversations that it cannot go on with."""

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Take facts that belong together, in order, and what to call when they are durable."""

    async def append(self, records: Sequence[Record]) -> bool:
        """Take facts, and return when they are durable; False if they were refused, as another node's by now."""

    async def calls_of(self, key: TurnKey) -> Sequence[StoredToolCall]:
        """Return the calls of tools that a turn has begun, in whatever attempt."""

    def release_nowait(self, released: Sequence[events.ConversationReleased]) -> None:
        """Leave conversations to other nodes, or to none until a caller has spoken."""

    def is_followed(self, job_id: JobId) -> bool:
        """Whether anybody looks at a job while it runs, so that its text should come as it is written."""

    def is_elsewhere(self, model: str) -> bool:
        """Whether another node has workers for a model."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The consequences of one attempt's end."""

    event: events.TurnEvent
    records: Sequence[Record] = ()
    findings: Sequence[Finding] = ()


class OnSlot(Protocol):
    """One turn on a slot: its attempt that runs, and what it is charged with."""

    key: TurnKey
    charges: Charges
    attempt: RunningAttempt

    @property
    def may_run_again(self) -> bool:
        """Whether another attempt could still give its caller the same."""

    async def run(self, worker: SupervisedWorker, lease: Lease) -> Outcome:
        """Ask the worker, and give the slot back; an end of any kind is a value."""

    def end_attempt(self, outcome: Outcome) -> None:
        """Keep what the attempt has brought, however it ended."""

    def complete(self) -> End:
        """Take a complete answer."""

    def run_again(self, reason: str, detail: str, trial: Trial | None) -> End:
        """Wait for another slot, here or in the next life of the service."""

    def fail(self, reason: FailureReason, detail: str) -> End:
        """End with a failure."""

    def cut_off(self) -> End:
        """End, since its conversation has."""


class Work(Protocol):
    """Owner of the turns of some jobs; everything is called by the scheduler alone, and nothing waits."""

    @property
    def any_on_slot(self) -> bool:
        """Whether a slot is taken."""

    def on_slots(self) -> Iterable[OnSlot]:
        """Return the turns that are on slots now."""

    def name_of(self, job_id: JobId) -> str:
        """Return the caller's name of a job that has not ended."""

    def owner_of(self, job_id: JobId) -> str | None:
        """Return the name of the key that a job which has not ended was posted with."""

    def agent_of(self, key: TurnKey) -> Agent:
        """Return the agent whose turn it is."""

    def place_of(self, key: TurnKey) -> int:
        """Return the agent's place among those of its job."""

    def note_ready(self, key: TurnKey, now: datetime) -> Sequence[Record]:
        """Let a turn wait for a slot; return the records of that."""

    def begin_attempt(self, key: TurnKey, worker: SupervisedWorker, now: datetime) -> tuple[OnSlot, Sequence[Record]]:
        """Begin an attempt on a worker."""

    def cut_off_attempt(self, key: TurnKey) -> None:
        """End the attempt of a turn, unless it has ended at the same moment: then its end comes next."""

    def interrupt_all(self) -> None:
        """End every attempt that is running; its turn runs again."""

    def abandon(self, key: TurnKey, detail: str) -> Sequence[Record]:
        """Fail a turn that waits for what cannot come."""

    def note_off_slot(self, key: TurnKey) -> None:
        """Take a turn off its slot."""

    def clear_charges(self, keys: Iterable[TurnKey]) -> None:
        """Clear turns of their charges for deaths that another turn explains."""

    def move(self, action: events.Move, now: datetime) -> Iterable[Record]:
        """Apply a move of a conversation or a job; return its records, made as they are asked for."""

    def clear(self) -> None:
        """Forget everything; nothing is on a slot."""
