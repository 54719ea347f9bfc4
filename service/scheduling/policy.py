"""In which order ready turns go to free slots. Pure; a policy is one function, and its name in ``POLICIES``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

Rank = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a policy may judge a ready turn by; smaller numbers of order are older."""

    job_priority: int
    is_retry: bool  # an attempt has failed already, and others may be waiting for this turn
    rounds_completed: int
    conversation_order: int
    round: int
    agent_order: int
    ready_order: int


def progress(turn: Candidate) -> Rank:
    """Rank as seed 000 does: retries, then conversations that are further, then older ones, then earlier rounds."""
    return (
        -turn.job_priority,
        0 if turn.is_retry else 1,
        -turn.rounds_completed,
        turn.conversation_order,
        turn.round,
        turn.agent_order,
    )


def fifo(turn: Candidate) -> Rank:
    """Rank by the moment at which the turn got ready."""
    return (-turn.job_priority, turn.ready_order)


Policy = Callable[[Candidate], Rank]
POLICIES: Final[Mapping[str, Policy]] = {"progress": progress, "fifo": fifo}
