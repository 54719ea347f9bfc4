"""Where a discussion is cut to fit the memory (specification, "Memory"): pure functions."""

from hypothesis import given
from hypothesis import strategies as st

from service.conversations.job.memory import SHARE, Cuts, Memory, first_shown

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 200), st.booleans())
def test_a_thousand_rounds_never_show_more_than_is_allowed(sizes: list[int], keep: int, by_context: bool) -> None:
    """The newest whole rounds are shown. A cut leaves at most a third of the limit, unless the last round is larger."""
    memory = Memory() if by_context else Memory(tokens=keep)
    room = keep if by_context else None
    first = 0
    for number in range(len(sizes) + 1):
        known = dict(enumerate(sizes[:number]))
        before, first = first, first_shown(memory, known, first, number, room)
        past = sum(sizes[first:number])
        assert before <= first <= number
        assert past <= keep
        if first > before:
            assert sum(sizes[before:number]) > keep, "nothing is cut that had room"
            assert past <= keep // SHARE or first == number - 1
            whole = sizes[first - 1] if first < number else 0
            assert past + whole > keep // SHARE or first == number, "no more is dropped than has to be"


@given(st.integers(1, 20), st.integers(1, 100))
def test_rounds_grow_again_after_each_cut(keep: int, rounds: int) -> None:
    """A window that slides would change every prompt after its beginning."""
    first, cuts = 0, 0
    for number in range(rounds):
        before, first = first, first_shown(Memory(rounds=keep), {}, first, number, None)
        assert number - first <= keep
        cuts += first > before
    assert cuts <= rounds / max(1, keep - -(-keep // SHARE))


def test_a_cut_stands_once_it_is_made() -> None:
    """There is one per round, whichever agent asks again; earlier rounds are shown what they were."""
    cuts = Cuts()
    assert (cuts.shown_in(9), cuts.is_decided(0, "a")) == (0, False)
    assert not cuts.decide(3, 0, "a")
    assert cuts.decide(5, 4, "a")
    assert cuts.decide(9, 8, "a")
    assert not cuts.decide(10, 8, "a")
    assert [cuts.shown_in(number) for number in (3, 4, 5, 8, 9, 12)] == [0, 0, 4, 4, 8, 8]
    assert (cuts.is_decided(10, "a"), cuts.is_decided(11, "a")) == (True, False)
    assert (cuts.decided_for(4), cuts.decided_for(8), cuts.decided_for(5)) == (range(6), range(6, 10), None)


def test_a_cut_is_decided_for_all_agents_together() -> None:
    """Agents with one text may be rounds apart: words that come later may be too many for a slower one."""
    cuts = Cuts()
    cuts.decide(5, 0, "ahead")
    assert cuts.is_any_decided(4)
    assert (cuts.is_decided(4, "ahead"), cuts.is_decided(4, "behind")) == (True, False)
    assert cuts.decide(4, 2, "behind")
    assert cuts.is_decided(4, "third")
    assert not cuts.is_decided(6, "ahead")
    assert [cuts.shown_in(number) for number in (3, 4, 6)] == [0, 2, 2]
