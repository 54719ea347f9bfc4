"""What the scheduler needs of the store of its facts, and the reasons for which it starts nothing."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from service.conversations.job import JobId, TurnKey
from service.store.records import Record, StoredToolCall


class RunCounters:
    """Written by the scheduler alone; counts since the start.

    Conversations that were taken up, have ended, and are durably so; turns of jobs that have ended; tokens that engines
    could have taken from their caches, and those that they report to have.
    """

    def __init__(self) -> None:
        self.conversations = 0
        self.finished = 0
        self.persisted = 0
        self.ended_turns = 0
        self.reusable_tokens = 0
        self.reused_tokens = 0

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
    """Where the scheduler's facts go, and conversations that it cannot go on with."""

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Take facts that belong together, in order, and what to call when they are durable."""

    async def append(self, records: Sequence[Record]) -> bool:
        """Take facts, and return when they are durable; False if they were refused, as another node's by now."""

    async def calls_of(self, key: TurnKey) -> Sequence[StoredToolCall]:
        """Return the calls of tools that a turn has begun, in whatever attempt."""

    def release_nowait(self, wants: Mapping[tuple[JobId, str], Sequence[str]]) -> None:
        """Leave conversations to other nodes, each with the models that it needs next."""

    def is_followed(self, job_id: JobId) -> bool:
        """Whether anybody looks at a job while it runs, so that its text should come as it is written."""

    def is_elsewhere(self, model: str) -> bool:
        """Whether another node has workers for a model."""
