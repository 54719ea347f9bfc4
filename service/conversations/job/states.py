"""The states of jobs, conversations and turns (specification, "States")."""

from enum import StrEnum
from typing import Final


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"  # durable, no turn has started
    RUNNING = "running"  # at least one turn has started
    COMPLETED = "completed"  # every conversation completed
    COMPLETED_WITH_FAILURES = "completed_with_failures"  # some completed, some did not
    FAILED = "failed"  # no conversation completed
    CANCELLED = "cancelled"  # ended by its caller


class ConversationState(StrEnum):
    """The state of a conversation."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TurnState(StrEnum):
    """The state of a turn."""

    PENDING = "pending"  # waits for others to speak
    AWAITED = "awaited"  # waits for a caller to speak
    READY = "ready"  # waits for a slot
    IN_FLIGHT = "in_flight"  # on a slot
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED_JOBS: Final = frozenset(
    {JobState.COMPLETED, JobState.COMPLETED_WITH_FAILURES, JobState.FAILED, JobState.CANCELLED}
)

ENDED_CONVERSATIONS: Final = frozenset(
    {ConversationState.COMPLETED, ConversationState.FAILED, ConversationState.CANCELLED}
)

ENDED_TURNS: Final = frozenset({TurnState.COMPLETED, TurnState.FAILED, TurnState.CANCELLED})


def job_state_after(ended: frozenset[ConversationState], *, was_cancelled: bool) -> JobState:
    """Return the final state of a job from the states of its conversations."""
    if was_cancelled:
        return JobState.CANCELLED
    if ended == {ConversationState.COMPLETED}:
        return JobState.COMPLETED
    return JobState.COMPLETED_WITH_FAILURES if ConversationState.COMPLETED in ended else JobState.FAILED
