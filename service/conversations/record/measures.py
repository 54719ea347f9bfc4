"""The measures of an ended attempt; only its usage is stored."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from service.conversations.job.job import TurnKey
from service.conversations.job.states import TurnState


class UsageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Usage, in tokens and in seconds of a slot.

    ``turns`` were completed. ``prompt_tokens``, including ``cached_tokens`` from a cache, and ``answer_tokens`` belong
    to attempts that count; ``wasted_tokens`` were read and written by others.
    """

    turns: int = 0
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    wasted_tokens: int = 0
    slot_s: float = 0.0


class AttemptMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt on a slot, with its times in seconds.

    ``first_token_s`` counts from the start of its slot. ``token_s`` is the mean time per token of its newest answer,
    after the first; None is unknown. ``usage`` holds tokens as the engine reported them: prompt, cached prompt, answer.
    """

    model: str
    worker: str
    incarnation: int
    outcome: TurnState
    reason: str | None
    began_at: datetime
    seconds: float
    used: UsageCounts
    usage: tuple[int, int, int]
    first_token_s: float | None = None
    token_s: float | None = None
    finish_reason: str | None = None


class RequestMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """An ended request of a client, with its attempts; ``adapter`` is the one that it named.

    ``waited_s`` is its total wait for slots, ``trace_parent`` its client's header for traces.
    """

    key: TurnKey
    path: str
    model: str
    adapter: str | None
    outcome: TurnState
    reason: str | None
    began_at: datetime
    seconds: float
    waited_s: float
    attempts: Sequence[AttemptMeasures]
    trace_parent: str | None = None
