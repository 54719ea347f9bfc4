"""Which requests are ended when a shared KV cache runs out of room, and how much of it may be used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.kv_share import GROWTH, Holding, room_for, youngest_without_room

HOLDINGS = st.lists(
    st.builds(Holding, request=st.integers(1, 40), tokens=st.integers(1, 500)),
    max_size=8,
    unique_by=lambda holding: holding.request,
)


def of(*tokens: int) -> list[Holding]:
    """Return the tokens that requests 1, 2 and so on hold."""
    return [Holding(request=number, tokens=each) for number, each in enumerate(tokens, start=1)]


@pytest.mark.parametrize(
    ("tokens", "room", "going"),
    [
        ((), 1, []),
        ((900,), 1, []),
        ((60, 40), 100, []),
        ((60, 41), 100, [2]),
        ((10, 80, 30), 100, [3]),
        ((10, 95, 30), 100, [3, 2]),
        ((101, 1, 1), 100, [3, 2]),
        ((50, 1, 60), 100, [3]),
        ((50, 60, 1), 100, [3, 2]),
    ],
)
def test_the_youngest_requests_are_ended_until_the_others_have_room(
    tokens: tuple[int, ...], room: int, going: list[int]
) -> None:
    """To the token. A single request stays, and a small young one is ended before a large older one."""
    assert youngest_without_room(of(*tokens), room) == going
    assert youngest_without_room(of(*tokens)[::-1], room) == going


@given(HOLDINGS, st.integers(1, 1500))
def test_no_more_are_ended_than_needed_and_never_the_oldest(holdings: list[Holding], room: int) -> None:
    """The remaining requests have room or are one, and would have none with the last one ended."""
    going = youngest_without_room(holdings, room)
    by_age = sorted((each.request for each in holdings), reverse=True)
    assert going == by_age[: len(going)]
    staying = [each.tokens for each in holdings if each.request not in going]
    assert bool(staying) is bool(holdings)
    assert sum(staying) <= room or len(staying) == 1
    if going:
        last = next(each.tokens for each in holdings if each.request == going[-1])
        assert sum(staying) + last > room


def test_room_is_what_is_left_for_two_looks_of_writing() -> None:
    """It follows from the rate of all together, and what each may write before it can be ended."""
    assert room_for(1000, 0, 0.0, 0.1) == 1000
    assert room_for(1000, 3, 0.0, 0.1) == 1000 - 3 * GROWTH
    assert room_for(1000, 3, 500.0, 0.1) == 1000 - 3 * GROWTH - 100
    assert room_for(1000, 3, 1e6, 0.1) == 1


@given(st.integers(1, 10**6), st.integers(0, 64), st.floats(0, 1e5), st.floats(0.01, 2.0))
def test_the_allowed_use_is_never_full_before_the_look_after_next(
    size: int, holdings: int, rate: float, look_s: float
) -> None:
    """If nothing is allowed, one request is let in nevertheless."""
    room = room_for(size, holdings, rate, look_s)
    assert room >= 1
    assert room == 1 or room + 2 * look_s * rate + GROWTH * holdings <= size + 0.5
