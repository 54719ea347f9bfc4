"""The events of a job's stream.

An event of a kind that this version does not know has a ``value`` of None, and its content in ``data``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from roundhouse_client.values.value import Value

END: Final = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange(Value):
    """The job was posted, or has started."""

    state: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationChange(Value):
    """A conversation has started or ended."""

    conversation: str
    state: str
    reason: str | None
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnChange(Value):
    """A turn's change of state; ``detail`` says in words why it runs again."""

    conversation: str
    agent: str
    round: int
    state: str
    worker: str | None
    reason: str | None
    detail: str | None
    at: datetime
    kind: str = "turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnProgress(Value):
    """The progress of one turn in flight."""

    conversation: str
    agent: str
    round: int
    prompt_tokens_done: int
    prompt_tokens: int | None
    output_tokens: int
    tokens_per_s: float
    verdict: str | None
    silent_s: float
    silence_limit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Value):
    """The progress of the turns in flight; not stored."""

    turns: tuple[TurnProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap(Value):
    """A model of the job was loaded on a lane, in ``seconds``; not stored."""

    lane: str
    model: str
    left: str | None
    because: str
    seconds: float
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Value):
    """The numbers of events that are no longer stored."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd(Value):
    """The job has ended; nothing follows."""

    state: str
    at: datetime


News = JobChange | ConversationChange | TurnChange | Progress | Swap | Gap | JobEnd
KINDS: Final[Mapping[str, type[News]]] = {
    "job": JobChange,
    "conversation": ConversationChange,
    "turn": TurnChange,
    "progress": Progress,
    "swap": Swap,
    "gap": Gap,
    END: JobEnd,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job: its number within the job, None if it is not stored; its kind, its JSON and its value."""

    number: int | None
    kind: str
    data: Mapping[str, Any]
    value: News | None
