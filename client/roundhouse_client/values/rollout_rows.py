"""Rollouts: the recorded tokens of conversations, and their rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from roundhouse_client.values.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReward(Value):
    """The reward of a conversation, or of one ``agent`` in it."""

    conversation: str
    agent: str | None
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession(Value):
    """A session: ``url`` is the base URL of an agent whose requests are recorded.

    ``model`` answers all of them, None the one that each names. ``uncertain`` counts the exchanges whose answers its
    client may not have. It is deleted ``ttl_s`` seconds after its last use, at ``expires_at``.
    """

    id: str
    url: str
    model: str | None
    record: Mapping[str, bool]
    max_staleness: int | None
    ttl_s: float
    created_at: datetime
    expires_at: datetime
    exchanges: int
    uncertain: int
    reward: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow(Value):
    """One chain of one agent: each of its prompts begins with all tokens before it.

    The model has read ``prompt_ids``, then wrote and read ``completion_ids``; ``mask`` is 1 where it wrote.
    ``logprobs`` and ``versions`` have an entry for each of those, None where it only read. ``number`` grows from row to
    row of a job, and is where a reader goes on ``after``. ``behind`` says by how many versions of the weights the first
    and the last written token are behind. ``partial`` lists what is not whole: prompt, ids, logprobs or store.
    ``state`` is that of the conversation, which may have failed after these turns.
    """

    number: int
    job: str
    conversation: str
    agent: str
    chain: int
    rounds: tuple[int, ...]
    state: str
    group: str | None
    sample: int
    samples: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float | None, ...] | None
    logprobs_mode: str
    versions: tuple[int | None, ...]
    behind: tuple[int, ...] | None
    stop_reason: str | None
    params: tuple[Mapping[str, object], ...]
    partial: tuple[str, ...]
    reward: float | None
    reward_error: str | None
    metrics: Mapping[str, float]
