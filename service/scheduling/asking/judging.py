"""Judges answers: their faults, the conditions they meet, and the patterns that take too long to be tried again."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from service.conversations.job.job import Agent
from service.conversations.job.until import Condition, Judged, Until, conditions_of, find_fulfilled
from service.conversations.job.validation import Validation, read_words
from transport.request import Constraint, Thought
from workers.offload.pool import ELSEWHERE_S, JUDGE_LIMIT_S, QUICK_CHARS, QUICK_S, offload
from workers.offload.pool import judge as judge_offloaded

TRIES: Final = 5  # timeouts of one pattern or schema in a job after which it is no longer tried
GIVEN_UP: Final = "its validation ran out of time too often in this job, and is not tried any more"
TOO_LONG: Final = "its validation did not end in time"
Place = tuple[str, str | None]  # its path in the job, and the pattern; None is a schema
logger = logging.getLogger(__name__)


class Overruns:
    """The patterns and schemas of one job that timed out, by path, and those that are no longer tried."""

    def __init__(self) -> None:
        self._overran: Counter[Place] = Counter()
        self._given_up: set[Place] = set()

    def __repr__(self) -> str:
        return f"<Overruns given_up={sorted(self._given_up)}>"

    def resume(self, places: Iterable[Place]) -> None:
        """Restore what was given up in an earlier life of the service or by another node."""
        self._given_up.update(places)

    def may_try(self, path: str, pattern: str | None) -> bool:
        """Whether a pattern, or the schema if it is None, is still tried."""
        return (path, pattern) not in self._given_up

    def note_one(self, path: str, pattern: str | None) -> bool:
        """Count a timeout; return whether this one was the last that was allowed."""
        place = path, pattern
        self._overran[place] += 1
        if self._overran[place] < TRIES or place in self._given_up:
            return False
        self._given_up.add(place)
        return True


def do_nothing() -> None:
    """Do nothing."""


async def judge_conditions(
    conditions: Mapping[int, Condition],
    words: str,
    signals: Sequence[str],
    aside: Callable[[], None] = do_nothing,
) -> Judged:
    """Return the conditions that a turn meets, and those that took too long and count as not met.

    ``words`` come from ``read_words``. ``aside`` is called before other processes judge, which may take long.
    """
    size = max(len(words), sum(condition.chars for condition in conditions.values()))
    if size <= QUICK_CHARS:
        quick = find_fulfilled(conditions, words, signals, QUICK_S)
        if not quick.overran:
            return quick
    aside()
    try:
        judged = await offload(find_fulfilled, conditions, words, signals, ELSEWHERE_S, limit_s=JUDGE_LIMIT_S)
    except TimeoutError:
        patterns = {place: each for place, each in conditions.items() if each.matches is not None}
        others = {place: each for place, each in conditions.items() if each.matches is None}
        judged = Judged(fulfils=find_fulfilled(others, words, signals, 0.0).fulfils, overran=tuple(patterns))
    if judged.overran:
        logger.warning("a pattern of until takes too long on %d characters, and counts as not matched", len(words))
    return judged


async def judge_answer(
    validation: Validation, answer: str, aside: Callable[[], None] = do_nothing, *, has_markup: bool = True
) -> str | None:
    """Return the fault of an answer, or None. A caller's words have no markup.

    Raises:
        TimeoutError: the check takes too long.
    """
    fault_of = validation.fault_of if has_markup else validation.fault_of_words
    return await judge_offloaded(fault_of, answer, size=max(len(answer), validation.chars), aside=aside)


def constraint_of(agent: Agent) -> Constraint | None:
    """Return the constraint of an agent's answers; None if its author sets one or disables it."""
    validation = agent.validation
    if validation is None or not validation.is_constrained or agent.is_constrained:
        return None
    return validation.constraint(Thought.OPTIONAL if agent.markup else Thought.NONE)


class AnswerJudge:
    """Judges the complete answer of one turn: whether it is valid, and which conditions it meets on its own.

    ``leave_slot`` lets others have the turn's slot while the answer is judged elsewhere. ``give_up`` gets the path and
    the pattern that are no longer tried.
    """

    def __init__(
        self,
        agent: Agent,
        place: int,
        until: Until,
        overruns: Overruns,
        leave_slot: Callable[[], None],
        give_up: Callable[[str, str | None], None],
    ) -> None:
        self._agent = agent
        self._place = place
        self._until = until
        self._overruns = overruns
        self._leave_slot = leave_slot
        self._give_up = give_up

    def __repr__(self) -> str:
        return f"<AnswerJudge of {self._agent.id}>"

    async def find_fault(self, answer: str) -> str | None:
        """Return the fault of an answer, or None."""
        validation = self._agent.validation
        if validation is None:
            return None
        if self._is_given_up(validation):
            return GIVEN_UP
        try:
            return await judge_answer(validation, answer, self._leave_slot)
        except TimeoutError:
            self._note_overrun(self._path_of(validation), validation.pattern)
            return TOO_LONG

    async def is_worth_keeping(self, answer: str) -> bool:
        """Whether an answer that still has its slot needs no second request there.

        It counts no timeouts, since the answer is judged again later.
        """
        validation = self._agent.validation
        if validation is None or self._is_given_up(validation):
            return True
        try:
            return await judge_answer(validation, answer) is None
        except TimeoutError:
            return False

    def _is_given_up(self, validation: Validation) -> bool:
        return not self._overruns.may_try(self._path_of(validation), validation.pattern)

    def _path_of(self, validation: Validation) -> str:
        return f"agents[{self._place}].validation.{validation.slow_field}"

    async def find_fulfilled(self, words: str, signals: Sequence[str]) -> tuple[int, ...]:
        """Return the indexes of the conditions that a turn meets on its own."""
        known = conditions_of(self._until, self._agent.id)
        conditions = {n: each for n, each in known.items() if self._overruns.may_try(_path_of(n), each.matches)}
        if not conditions:
            return ()
        read = read_words(words, self._agent.validation, has_markup=True)
        judged = await judge_conditions(conditions, read, signals, self._leave_slot)
        for place in judged.overran:
            self._note_overrun(_path_of(place), conditions[place].matches)
        return judged.fulfils

    def _note_overrun(self, path: str, pattern: str | None) -> None:
        if self._overruns.note_one(path, pattern):
            self._give_up(path, pattern)


def _path_of(place: int) -> str:
    """Return the path of a condition in its conversation."""
    return f"until[{place}].matches"
