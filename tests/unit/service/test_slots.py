"""Slots alone: every state with every move, and the numbers of a worker through any course of events."""

from itertools import product
from random import Random

import pytest

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.slots import MOVES, Slot, SlotMove, SlotState

# Each state and the moves that it has; every other pair is a fault of the caller.
TABLE = """
free   take:taken  try:trial  hold:held
taken  lend:lent   leave:free
trial  leave:free
lent   take:taken  try:trial  hold:held  leave:free
held   take:taken  try:trial  leave:free
"""


def key(number: int) -> TurnKey:
    return TurnKey(JobId("j"), f"c{number}", "a", 0)


def test_a_slot_has_the_moves_of_its_table() -> None:
    """Every state with every move gives the state after it, or an error and no change."""
    rows = [line.split() for line in TABLE.strip().splitlines()]
    table = {(state, *move.split(":")) for state, *moves in rows for move in moves}
    assert {(before, move, after) for (before, move), after in MOVES.items()} == table
    for state, move in product(SlotState, SlotMove):
        slot = Slot(0)
        slot.state = state
        if (state, move) in MOVES:
            slot.move(move, key(1))
            assert slot.state is MOVES[state, move]
        else:
            with pytest.raises(KeyError):
                slot.move(move, key(1))
            assert slot.state is state


def test_a_turn_that_lent_its_slot_has_it_back_unless_another_took_it() -> None:
    """Its cache is intact as long as no other turn used the slot."""
    pool = InFlightPool()
    pool.open("w", "m", 2)
    pool.add(key(1), "w")
    own = pool.worker("w")
    pool.lend(key(1))
    pool.add(key(2), "w")  # the slot that is free goes first
    assert pool.take_back(key(1))
    assert list(own.check({key(1): pool._seats[key(1)].slots, key(2): pool._seats[key(2)].slots})) == []
    pool.lend(key(1))
    pool.add(key(3), "w")
    assert not pool.take_back(key(1))
    pool.remove(key(2))
    assert pool.take_back(key(1))
    assert [fault for fault in pool.check() if fault] == []


def test_a_turn_takes_a_held_slot_back_and_the_program_has_the_next() -> None:
    """A turn that lent its slot goes before a program; the program's slot is held again as soon as one is free."""
    pool = InFlightPool()
    pool.open("w", "m", 1)
    pool.add(key(1), "w")
    pool.lend(key(1))
    worker = pool.worker("w")
    assert worker.hold(key(9))
    assert worker.offer == 0
    assert pool.take_back(key(1))
    assert worker.free == -1
    pool.remove(key(1))
    assert (worker.free, worker.held) == (0, 1)
    assert worker.end_hold(key(9))
    assert not worker.end_hold(key(9))
    assert worker.offer == 1


@pytest.mark.parametrize("seed", range(50))
def test_numbers_agree_in_any_course_of_events(seed: int) -> None:
    """Turns of all widths start, end and lend. Workers become ready with other numbers of slots, and are lost."""
    chance = Random(seed)  # noqa: S311
    pool, number, held = InFlightPool(), 0, list[TurnKey]()
    for _ in range(300):
        worker = chance.choice("vw")
        on, flying = pool.worker(worker), pool.keys()
        step = chance.randrange(7)
        if step == 0:
            pool.open(worker, "m", chance.randint(1, 5))
        elif step == 1 and chance.random() < 0.3:
            pool.close(worker, returns=chance.random() < 0.5)
        elif step == 2 and on.offer:
            number += 1
            pool.add(key(number), worker, slots=chance.randint(1, on.offer))
        elif step == 3 and flying:
            pool.remove(chance.choice(flying))
        elif step == 4 and flying:
            pool.lend(chance.choice(flying))
        elif step == 5 and (lent := [each for each in flying if pool.lender(each)]):
            pool.take_back(chance.choice(lent))
        elif on.offer and chance.random() < 0.5:
            number += 1
            assert on.hold(key(number))
            held.append(key(number))
        elif held:
            pool.worker(worker).end_hold(chance.choice(held))
        assert [fault for fault in pool.check() if fault] == []
