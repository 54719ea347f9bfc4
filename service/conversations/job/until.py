"""The conditions that end a conversation before its rounds are over (specification, "Ends"). Pure.

Conditions are judged on the record: what each turn fulfils on its own is stored with it, and all else follows from
words and tokens. So a restart decides the same.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec
from typing_extensions import override

from service.conversations.job.validation import COMPILED, folded, plain, read_answer
from workers.tools.schemas import is_found, within

SILENCE: Final = 0  # the words of a turn without words
LONG: Final = 256  # characters from which words are folded only once, for all conversations that begin with them
MOST_HASHES: Final = 16_384
_HASHES: dict[int, int] = {}  # folded words' hashes by the words' own; a thread that prepares heirs fills it too


class SaidWords:
    """The words of one turn as validation reads them, in the forms of conditions, each made on demand."""

    def __init__(self, words: str) -> None:
        self.words = words.strip()

    def __repr__(self) -> str:
        return f"<SaidWords {self.words[:40]!r}>"

    @cached_property
    def plain(self) -> str:
        """The words without letter case, spacing and surrounding marks."""
        return plain(self.words)

    @cached_property
    def value(self) -> object:
        """Their JSON value; None if they are no JSON."""
        try:
            return read_answer(self.words)
        except ValueError:
            return None

    def holds(self, field: str, wanted: object) -> bool:
        """Whether a field of their JSON has this value; texts are compared without case and spacing."""
        found = self.value
        for name in field.split("."):
            if not isinstance(found, dict) or name not in found:
                return False
            found = found[name]
        return scalar_key(found) == scalar_key(wanted)


def scalar_key(value: object) -> object:
    """Return a key of a JSON value, equal for equal values; None for lists, mappings and null."""
    if isinstance(value, str):
        return "text", folded(value)
    if isinstance(value, bool):
        return "truth", value
    return ("number", value) if isinstance(value, int | float) else None


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One condition, of one of seven kinds: only the fields of that kind are set.

    ``agent`` says one of ``says`` (folded), or text that ``matches``, or JSON whose ``field`` ``equals`` a text, a
    number or a truth value; dots separate the names of nested objects. ``agent``, or any agent if it is None, sends
    ``signal``. All of ``agree`` say the same in one round. All agents repeat their words for ``unchanged`` rounds. All
    answers together have ``answer_tokens``.
    """

    agent: str | None = None
    says: tuple[str, ...] = ()
    matches: str | None = None
    field: str | None = None
    equals: object = None
    signal: str | None = None
    agree: tuple[str, ...] = ()
    unchanged: int | None = None
    answer_tokens: int | None = None

    @property
    def is_of_a_turn(self) -> bool:
        """Whether a single turn fulfils it."""
        return bool(self.says or self.matches is not None or self.field is not None or self.signal is not None)

    @property
    def judged(self) -> tuple[str, ...] | None:
        """The agents whose turns it reads, None for all."""
        return self.agree or (None if self.agent is None else (self.agent,))

    @property
    def chars(self) -> int:
        """The length of a text that takes as long to judge."""
        wanted = len(self.equals) if isinstance(self.equals, str) else 0
        return COMPILED * len(self.matches or "") + sum(map(len, self.says)) + wanted

    def is_fulfilled(self, said: SaidWords, signals: Collection[str], limit_s: float) -> bool:
        """Whether a turn of its agent fulfils it on its own.

        Raises:
            TimeoutError: the check takes longer than ``limit_s`` of this thread's own time.
        """
        if self.says:
            return said.plain in map(plain, self.says)
        if self.matches is not None:
            with within(limit_s):
                return bool(said.words) and is_found(self.matches, said.words)
        if self.field is not None:
            return said.holds(self.field, self.equals)
        return self.signal in signals


Until = tuple[Condition, ...]


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The condition that ended a conversation, by its index in ``until``, or the ``leader`` that did.

    ``agent`` fulfilled the condition alone.
    """

    until: int | None = None
    agent: str | None = None
    leader: str | None = None
    round: int

    @property
    def document(self) -> dict[str, object]:
        """The form that callers see."""
        if self.leader is not None:
            return {"leader": self.leader, "round": self.round}
        return {"until": self.until, "agent": self.agent, "round": self.round}


class TurnDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of an ended turn, which decides the speaking order; a failed turn has no words.

    ``fulfils`` holds the indexes of conditions that it fulfils on its own. ``words`` stands for its words: equal for
    equal words while this process lives. An agent that ``leaves`` has no further turn. ``chosen`` is the agent that a
    leader has named, None if it ends the conversation. A turn with ``is_inherited`` ends nothing.
    """

    fulfils: tuple[int, ...] = ()
    words: int = SILENCE
    tokens: int = 0
    leaves: bool = False
    chosen: str | None = None
    is_inherited: bool = False


NOTHING: Final = TurnDigest()
INHERITED: Final = TurnDigest(is_inherited=True)


class Ends:
    """The conditions of one conversation, and those fulfilled so far; an agent is its index in ``agents``.

    ``tokens`` counts answers without a turn here, of agents that the job lacks.
    """

    __slots__ = ("_agents", "_first_own", "_fulfilled", "_tokens", "_unchanged", "_until", "_words")

    def __init__(self, until: Until, agents: Sequence[str], tokens: int = 0) -> None:
        self._until = until
        self._agents = agents
        self._fulfilled: dict[int, tuple[int, int]] = {}  # by condition: the agent and the round
        self._words: dict[int, dict[str, int]] = {}  # by round that is compared; silence has no entry
        self._unchanged = 0  # consecutive rounds without a change
        self._first_own: int | None = None  # rounds before it are all inherited
        self._tokens = tokens

    def __repr__(self) -> str:
        return f"<Ends {len(self._fulfilled)} of {len(self._until)} fulfilled>"

    @property
    def judged(self) -> frozenset[int]:
        """The agents whose turns these conditions read."""
        every = range(len(self._agents))
        by = [condition.judged for condition in self._until]
        return frozenset(every if None in by else (self._agents.index(each) for names in by for each in names or ()))

    def count_turn(self, agent: int, round_number: int, digest: TurnDigest) -> list[tuple[int, ...]]:
        """Count an ended turn; return, for each condition that it completes, the agents that have fulfilled it."""
        return self._count(agent, round_number, digest, self._words.setdefault(round_number, {}))

    def _count(self, agent: int, round_number: int, digest: TurnDigest, said: dict[str, int]) -> list[tuple[int, ...]]:
        self._tokens += digest.tokens
        if digest.words != SILENCE:
            said[self._agents[agent]] = digest.words
        if digest.is_inherited:
            return []
        if self._first_own is None or round_number < self._first_own:  # in free mode others may be rounds ahead
            self._first_own = round_number
        for place in digest.fulfils:
            by = (agent, round_number)
            # The first of several turns counts, by agent and round.
            self._fulfilled[place] = min(by, self._fulfilled.get(place, by))
        fulfilled: list[tuple[int, ...]] = [(agent,) for _ in digest.fulfils]
        for place, condition in enumerate(self._until):
            is_said = self._agents[agent] in condition.agree and self._agents[agent] in said
            if is_said and len({said.get(each) for each in condition.agree}) == 1:
                self._fulfilled[place] = agent, round_number
                fulfilled.append(tuple(map(self._agents.index, condition.agree)))
        return fulfilled

    def end_round(self, round_number: int) -> Ending | None:
        """Count the end of a round; return the ending of the conversation, if the round ends it."""
        said = self._words.setdefault(round_number, {})
        return self._judge(round_number, is_unchanged=self._words.pop(round_number - 1, None) == said)

    def _judge(self, round_number: int, *, is_unchanged: bool) -> Ending | None:
        self._unchanged = self._unchanged + 1 if is_unchanged else 0
        is_own = self._first_own is not None and self._first_own <= round_number
        for place, condition in enumerate(self._until if is_own else ()):
            is_still = condition.unchanged is not None and self._unchanged >= condition.unchanged
            if is_still or (condition.answer_tokens is not None and self._tokens >= condition.answer_tokens):
                self._fulfilled[place] = 0, round_number
        return self.first_fulfilled()

    def first_fulfilled(self) -> Ending | None:
        """Return the first listed condition that is fulfilled."""
        if not self._fulfilled:
            return None
        place = min(self._fulfilled)
        agent, round_number = self._fulfilled[place]
        by = self._agents[agent] if self._until[place].is_of_a_turn else None
        return Ending(until=place, agent=by, round=round_number)


class EndsOfLed(Ends):
    """The conditions with one speaker a round: each agent's last words are compared, except the leader's choices."""

    __slots__ = ("_is_unchanged", "_last")

    def __init__(self, until: Until, agents: Sequence[str]) -> None:
        super().__init__(until, agents)
        self._last: dict[str, int] = {}
        self._is_unchanged = False

    @override
    def count_turn(self, agent: int, round_number: int, digest: TurnDigest) -> list[tuple[int, ...]]:
        self._is_unchanged = self._last.get(self._agents[agent], SILENCE) == digest.words
        return self._count(agent, round_number, digest, self._last)

    def count_choice(self, leader: int, round_number: int, digest: TurnDigest) -> bool:
        """Count a turn of the leader; return whether it has fulfilled a condition."""
        self._is_unchanged = False
        return bool(self._count(leader, round_number, digest, {}))

    @override
    def end_round(self, round_number: int) -> Ending | None:
        return self._judge(round_number, is_unchanged=self._is_unchanged)


def conditions_of(until: Until, agent_id: str) -> dict[int, Condition]:
    """Return the conditions that a turn of an agent may fulfil on its own, by index."""
    return {
        place: condition
        for place, condition in enumerate(until)
        if condition.is_of_a_turn and condition.agent in {None, agent_id}
    }


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The indexes of the conditions that a turn fulfils, and of those that could not be judged in time."""

    fulfils: tuple[int, ...] = ()
    overran: tuple[int, ...] = ()


def find_fulfilled(
    conditions: Mapping[int, Condition],
    words: str,
    signals: Collection[str],
    limit_s: float,
) -> Judged:
    """Judge conditions within ``limit_s`` of this thread's own time, all together.

    Each gets an equal part of half the time; those that need more get an equal part of the rest.
    """
    fulfilled: list[int] = []
    left = list(conditions)
    said = SaidWords(words)
    for _ in range(2):
        share_s = limit_s / 2 / max(1, len(left))
        slow: list[int] = []
        for place in left:
            try:
                if conditions[place].is_fulfilled(said, signals, share_s):
                    fulfilled.append(place)
            except TimeoutError:
                slow.append(place)
        left = slow
    return Judged(fulfils=tuple(sorted(fulfilled)), overran=tuple(left))


def digest_of(until: Until, fulfils: tuple[int, ...], words: str, tokens: int | None) -> TurnDigest:
    """Return the digest of a completed turn, with only what these conditions need."""
    compares = any(condition.agree or condition.unchanged for condition in until)
    return TurnDigest(fulfils=fulfils, words=_hash_of(words) if compares else SILENCE, tokens=tokens or 0)


def _hash_of(words: str) -> int:
    """Return a number that is equal for words that differ only in case, spacing and surrounding marks."""
    if len(words) < LONG:
        return hash(plain(words)) if words.strip() else SILENCE
    known = _HASHES.get(hash(words))
    if known is None:
        if len(_HASHES) >= MOST_HASHES:
            _HASHES.clear()
        said = plain(words)
        known = _HASHES[hash(words)] = hash(said) if said else SILENCE
    return known
