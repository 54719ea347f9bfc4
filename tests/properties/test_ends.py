"""Conditions end a conversation the same way, in any order of ends and after any kill of the service."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from service.conversations.job.until import Condition, Ending, Ends, TurnDigest, Until, conditions_of, find_fulfilled
from service.conversations.talk.dependencies import Dependencies
from service.conversations.talk.turn_order import Place, RoundsOrder

NAMES = ("a", "b", "c", "d")
SHAPES = st.lists(st.sets(st.integers(0, 3)), min_size=4, max_size=4).map(
    lambda rows: tuple(tuple(sorted(other for other in row if other < number)) for number, row in enumerate(rows))
)
READ = st.lists(st.integers(0, 15), min_size=4, max_size=4)
CONDITIONS = st.lists(
    st.one_of(
        st.builds(lambda name: Condition(agent=name, says=("yes",)), st.sampled_from(NAMES)),
        st.just(Condition(signal="stop")),
        st.builds(
            lambda names: Condition(agree=tuple(names)), st.lists(st.sampled_from(NAMES), min_size=2, unique=True)
        ),
        st.builds(lambda rounds: Condition(unchanged=rounds), st.integers(1, 2)),
        st.builds(lambda tokens: Condition(answer_tokens=tokens), st.integers(1, 30)),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
Shape = tuple[tuple[int, ...], ...]
Digests = Callable[[Place], TurnDigest]


def said_by(seed: int, until: Until) -> Digests:
    """Return what each turn says in every attempt, from few words, so that conditions hold now and then."""

    def digest(place: Place) -> TurnDigest:
        dice = Random(f"{seed} {place}")  # noqa: S311
        fulfils = tuple(
            number
            for number, condition in enumerate(until)
            if condition.is_of_a_turn and condition.agent in {None, NAMES[place.agent]} and dice.random() < 0.2
        )
        if dice.random() < 0.1:  # it failed, and its agent may have left
            return TurnDigest(leaves=dice.random() < 0.5)
        return TurnDigest(fulfils=fulfils, words=dice.randrange(3), tokens=dice.randrange(4))

    return digest


def dependencies_of(shape: Shape, read: Sequence[int]) -> Dependencies:
    """Return for agents that read these others which agents they wait for, as masks, and themselves."""
    everybody = (1 << len(shape)) - 1
    return Dependencies(shape, tuple(read[agent] & everybody | 1 << agent for agent in range(len(shape))))


def play(
    dependencies: Dependencies, until: Until, digest: Digests, dice: Random, rounds: int = 4
) -> tuple[Mapping[Place, TurnDigest], Ending | None]:
    """Play a conversation to its end in a random order of ends, and restart from the record now and then."""
    names = NAMES[: len(dependencies.waits_for)]
    order = RoundsOrder(dependencies, rounds, Ends(until, names))
    record: dict[Place, TurnDigest] = {}
    at_work = order.replay(record)
    while not order.is_over and not order.is_deserted:
        if dice.random() < 0.2:
            order = RoundsOrder(dependencies, rounds, Ends(until, names))
            at_work = order.replay(record)
            continue
        place = at_work.pop(dice.randrange(len(at_work)))
        record[place] = digest(place)
        at_work += order.end_turn(place, record[place])
        assert len(set(at_work)) == len(at_work)
        assert not record.keys() & set(at_work)
    assert not at_work, "no turn waits when all is over"
    left = {place.agent for place, each in record.items() if each.leaves}
    there = [agent for agent in range(len(names)) if agent not in left]
    assert order.is_deserted == (not there)
    assert not any(order.open_rounds(agent) for agent in left)
    assert sum(len(order.open_rounds(agent)) for agent in there) == sum(place.agent in there for place in record)
    for agent in left:
        assert record[max(place for place in record if place.agent == agent)].leaves, "whoever has left is silent"
    return record, order.ending


@settings(max_examples=400)
@given(SHAPES, READ, CONDITIONS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_record_alone_decides_the_end(shape: Shape, read: list[int], until: Until, seed: int, luck: int) -> None:
    """Specification, "Ends": the same turns exist and the same condition is reported, in any order and over kills."""
    undisturbed, ending = play(dependencies_of(shape, read), until, said_by(seed, until), Random(0))  # noqa: S311
    disturbed, again = play(dependencies_of(shape, read), until, said_by(seed, until), Random(luck))  # noqa: S311
    assert (dict(sorted(disturbed.items())), again) == (dict(sorted(undisturbed.items())), ending)


@settings(max_examples=400)
@given(SHAPES, READ, CONDITIONS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_record_fulfils_its_end_and_nothing_earlier_does(
    shape: Shape, read: list[int], until: Until, seed: int, luck: int
) -> None:
    """In reverse: conditions are judged again on the whole record, by another implementation of the specification."""
    record, ending = play(dependencies_of(shape, read), until, said_by(seed, until), Random(luck))  # noqa: S311
    held = {number: holding(until, record, number) for number in range(4)}
    first = next((number for number in range(4) if held[number]), None)
    assert (first is None) == (ending is None)
    if ending is not None and first is not None:
        assert (ending.round, ending.until) == (first, min(held[first]))
        assert max(place.round for place in record) == first
    last = [place for place in record if ending is not None and place.round == ending.round]
    gone = {place.agent for place, digest in record.items() if digest.leaves} - {place.agent for place in last}
    there = tuple(() if number in gone else tuple(set(waits) - gone) for number, waits in enumerate(shape))
    after = [after_each(there, place.agent) for place in last if record[place].fulfils]
    assert not {place.agent for place in last} & set().union(*after), "whoever waits for what ends it never speaks"


def after_each(shape: Shape, agent: int) -> set[int]:
    """Return who speaks after an agent in its round."""
    after: set[int] = set()
    for other, waits in enumerate(shape):
        if {agent, *after} & set(waits):
            after.add(other)
    return after


def test_silence_matches_no_condition() -> None:
    """Specification, "Ends": not even a pattern that matches the empty text."""
    conditions = conditions_of((Condition(agent="a", matches="^"), Condition(agent="a", says=("yes",))), "a")
    assert find_fulfilled(conditions, " \n", (), 1.0).fulfils == ()
    assert find_fulfilled(conditions, " Yes ", (), 1.0).fulfils == (0, 1)


def holding(until: Until, record: Mapping[Place, TurnDigest], number: int) -> set[int]:
    """Return the conditions that hold in a round, from the record."""
    spoken = {place.agent: digest for place, digest in record.items() if place.round == number}
    held = {condition for digest in spoken.values() for condition in digest.fulfils}
    for place, condition in enumerate(until):
        if condition.agree:
            words = {spoken[NAMES.index(each)].words if NAMES.index(each) in spoken else 0 for each in condition.agree}
            held |= {place} if len(words) == 1 and words != {0} else set()
        if condition.answer_tokens is not None:
            tokens = sum(digest.tokens for spot, digest in record.items() if spot.round <= number)
            held |= {place} if spoken and tokens >= condition.answer_tokens else set()
        if condition.unchanged is not None:
            rounds = range(number - condition.unchanged + 1, number + 1)
            held |= {place} if spoken and all(_is_unchanged(record, each) for each in rounds) else set()
    return held


def _is_unchanged(record: Mapping[Place, TurnDigest], number: int) -> bool:
    words = [
        {place.agent: digest.words for place, digest in record.items() if place.round == each and digest.words}
        for each in (number - 1, number)
    ]
    return number > 0 and words[0] == words[1]
