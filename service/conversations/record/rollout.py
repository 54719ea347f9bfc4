"""Rows of rollouts: the recorded tokens of one agent's turns in a conversation, as chains. Pure.

A prompt that does not begin with all tokens before it begins a chain of its own, and a row of its own: a template may
rewrite the past, a memory cuts it, and a text may become other tokens than those that were written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from service.conversations.record.token_arrays import RecordedMessage
from workers.requests.tokens import Lacking

MIXED: Final = "mixed"  # mode of a chain whose messages have logprobs of several kinds
ROWS_A_CONVERSATION: Final = 100_000  # between the numbers of two conversations' first rows


class SpokenTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded messages of one turn, in the order in which they were written; none if the store has none."""

    agent: str
    round: int
    messages: Sequence[RecordedMessage]
    partial: Sequence[str] = ()


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a conversation, or of an agent in it; None with an ``error`` if its source has failed."""

    reward: float | None = None
    error: str | None = None
    metrics: dict[str, float] = {}


class RowPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation of rows: its state, its place in its group, and the number of its ``first`` row."""

    job: str
    conversation: str
    state: str
    first: int
    group: str | None = None
    sample: int = 0
    samples: int = 1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One chain of one agent: the form ``rows``.

    The model has read ``prompt_ids``, then wrote and read ``completion_ids``. ``mask`` is 1 where it wrote.
    ``logprobs`` and ``versions`` have an entry for each of those, None where it only read. ``behind`` says by how many
    versions of the weights the first and the last written token are behind, None where none are known. ``number`` grows
    from row to row of a job. ``state`` is the conversation's, which may have failed after these turns.
    """

    number: int
    job: str
    conversation: str
    agent: str
    chain: int
    rounds: tuple[int, int]
    state: str
    group: str | None = None
    sample: int = 0
    samples: int = 1
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None] | None
    logprobs_mode: str
    versions: Sequence[int | None]
    behind: tuple[int, int] | None = None
    stop_reason: str | None
    params: Sequence[dict[str, object]]
    partial: Sequence[str]
    reward: float | None = None
    reward_error: str | None = None
    metrics: dict[str, float] = {}


class Chain:
    """The tokens of one chain so far; ``prompt`` is what the model had read before it first wrote."""

    def __init__(self, agent: str, number: int, round_number: int) -> None:
        self.agent = agent
        self.number = number
        self.rounds = (round_number, round_number)
        self.prompt: list[int] = []
        self.completion: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float | None] = []
        self.versions: list[int | None] = []
        self.params: list[dict[str, object]] = []
        self.messages: list[tuple[int, RecordedMessage]] = []  # each with its round
        self.partial: set[str] = set()
        self.mode = ""
        self.has_logprobs = True
        self.stop_reason: str | None = None

    def __repr__(self) -> str:
        return f"<Chain {self.agent} {self.number} tokens={len(self.completion)}>"

    @property
    def length(self) -> int:
        """The tokens of the chain, its prompt's included."""
        return len(self.prompt) + len(self.completion)

    def add(self, message: RecordedMessage, round_number: int) -> None:
        """Add a message that continues the chain, or begins it."""
        if self.messages:
            self._extend(message.prompt, 0, [None] * len(message.prompt), [None] * len(message.prompt))
        else:
            self.prompt = [*message.prompt]
        written = len(message.ids)
        versions: list[int | None] = [None] * written
        for version, start, end in message.versions:
            versions[start:end] = [version] * (min(end, written) - start)
        self._extend(message.ids, 1, message.logprobs or [None] * written, versions)
        self.has_logprobs &= message.logprobs is not None
        self.mode = message.mode if self.mode in ("", message.mode) else MIXED
        self.stop_reason = message.stop_reason
        self.partial |= {*message.partial}
        self.params.append(message.params)
        self.messages.append((round_number, message))
        self.rounds = (self.rounds[0], round_number)

    def _extend(
        self, ids: Sequence[int], mask: int, logprobs: Sequence[float | None], versions: Sequence[int | None]
    ) -> None:
        self.completion += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.versions += versions

    @property
    def is_open(self) -> bool:
        """Whether a prompt may continue it: one whose ids are not known has no end."""
        return bool(self.messages) and not {Lacking.PROMPT, Lacking.IDS, Lacking.STORE} & self.partial


def chains_of(turns: Iterable[SpokenTokens], agents: Iterable[str] = ()) -> list[Chain]:
    """Return the chains of a conversation, agent by agent, each in the order in which it spoke."""
    of_agents: dict[str, list[Chain]] = {name: [] for name in agents}
    for turn in turns:
        chains = of_agents.setdefault(turn.agent, [])
        if not turn.messages:  # its arrays are gone, and no prompt continues them
            lost = Chain(turn.agent, len(chains), turn.round)
            lost.partial |= {*turn.partial}
            chains.append(lost)
        for message in turn.messages:
            is_next = message.begins_at > 0 and chains and chains[-1].is_open
            if not is_next or chains[-1].length != message.begins_at:
                chains.append(Chain(turn.agent, len(chains), turn.round))
            chains[-1].add(message, turn.round)
    return [chain for chains in of_agents.values() for chain in chains]


def rows_of(
    place: RowPlace,
    chains: Sequence[Chain],
    rewards: Mapping[str, Reward],
    version_of: Callable[[str], int | None] = lambda _agent: None,
) -> Iterator[tuple[Row, Chain]]:
    """Yield the rows of a conversation and their chains.

    ``rewards`` are those of agents by name, and with an empty name that of
    all others. ``version_of`` returns the present version of the weights of an agent's model.
    """
    for index, chain in enumerate(chains):
        reward = rewards.get(chain.agent) or rewards.get("") or Reward()
        known = [each for each in chain.versions if each is not None]
        version = version_of(chain.agent)
        row = Row(
            number=place.first + index,
            job=place.job,
            conversation=place.conversation,
            state=place.state,
            agent=chain.agent,
            chain=chain.number,
            rounds=chain.rounds,
            group=place.group,
            sample=place.sample,
            samples=place.samples,
            prompt_ids=chain.prompt,
            completion_ids=chain.completion,
            mask=chain.mask,
            logprobs=chain.logprobs if chain.has_logprobs else None,
            logprobs_mode=chain.mode,
            versions=chain.versions,
            behind=(version - known[0], version - known[-1]) if known and version is not None else None,
            stop_reason=chain.stop_reason,
            params=chain.params,
            partial=sorted(chain.partial),
            reward=reward.reward,
            reward_error=reward.error,
            metrics=reward.metrics,
        )
        yield row, chain
