import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.conversations.job.job import TurnKey
from service.conversations.record.transcript import Charges
from service.scheduling.core.blame import (
    Blame,
    BlameVerdict,
    DeathExplained,
    DeathUnexplained,
    SourceDistrusted,
    SourceTrusted,
    SuspectsCleared,
    Trial,
)
from service.scheduling.core.deaths import DOUBT, MOST_DEATHS, TurnRecord, upper_bound
from service.scheduling.worker_findings import PROBATION, LoadLimits
from tests.harness.jobs import key

A, B, C = key("a"), key("b"), key("c")
OTHER = key("x", name="other")


class Case:
    """One model's blame, with short calls for its events; charges are kept as the scheduler keeps them."""

    def __init__(self, *, known: int = 0) -> None:
        self.blame = Blame()
        self.incarnation = 1
        self.charges: dict[TurnKey, Charges] = {}
        for number in range(known):
            turn = key("well", number)
            self.start(turn)
            self.end(turn)
        self.incarnation += 1

    def start(self, *keys: TurnKey) -> None:
        for each in keys:
            self.blame.start(each, "m", "w", self.incarnation)

    def end(self, each: TurnKey) -> tuple[object, ...]:
        return self.blame.acquit(each, self.charges.pop(each, Charges()), -9.0)

    def die(self, *keys: TurnKey, is_outside: bool = False) -> list[BlameVerdict]:
        verdicts = [
            self.blame.die(each, self.charges.get(each, Charges()), is_outside=is_outside, at=0.0) for each in keys
        ]
        self.charges |= {each: verdict.charges for each, verdict in zip(keys, verdicts, strict=True)}
        self.incarnation += 1
        return verdicts

    def dies_alone(self, each: TurnKey, *, is_outside: bool = False) -> BlameVerdict:
        self.start(each)
        return self.die(each, is_outside=is_outside)[0]


def test_a_death_of_several_turns_makes_suspects_and_convicts_none() -> None:
    """However often it happens: the cause is unknown among the turns in flight."""
    case = Case(known=1000)
    for _ in range(9):
        case.start(A, B)
        verdicts = case.die(A, B)
        told = [(each.trial, each.is_convicted, each.charges.deaths) for each in verdicts]
        assert told == [(Trial.NEXT, False, 0)] * 2


def test_a_death_counts_where_the_engine_had_served_one_at_a_time() -> None:
    """The turn is alone, on an engine that has served only acquitted trials since its start."""
    case = Case(known=1000)
    case.start(B)
    case.end(B)
    assert case.dies_alone(A).charges.deaths == 1
    case.start(B, C)
    case.end(B)
    case.end(C)
    verdict = case.dies_alone(A)  # this engine had served two at once
    assert (verdict.charges.deaths, verdict.trial) == (1, Trial.FIRST)  # where nothing was before it
    assert case.dies_alone(A).is_convicted


def test_an_engine_that_may_still_serve_a_cut_off_request_proves_nothing() -> None:
    """Closing the connection asks an engine to stop, and not every engine stops at once."""
    case = Case(known=1000)
    case.start(B)
    case.blame.end_unproven(B, is_cut_off=True, at=0.0)
    assert case.dies_alone(A).charges.deaths == 0


def test_an_engine_that_slept_keeps_its_record() -> None:
    """Another model used its lane meanwhile, and may have the number that the engine gets when it is started again."""
    blame = Blame()
    for turn, model, number in ((A, "m", 1), (B, "m", 1), (C, "other", 2)):
        blame.start(turn, model, "w", number)
    for turn in (A, B, C):
        blame.acquit(turn, Charges(), -9.0)
    blame.start(A, "m", "w", 1)  # it has woken, and had served two at once
    verdict = blame.die(A, Charges(), is_outside=False, at=0.0)
    assert (verdict.trial, verdict.charges.deaths) == (Trial.FIRST, 0)
    blame.start(A, "m", "w", 2)
    blame.end_unproven(A, is_cut_off=True, at=0.0)
    blame.start(C, "other", "w", 2)  # it has woken, and never had
    verdict = blame.die(C, Charges(), is_outside=False, at=0.0)
    assert (verdict.trial, verdict.charges.deaths) == (Trial.FIRST, 1)
    assert (blame.record("m").acquitted, blame.record("other").acquitted) == (2, 1)


@pytest.mark.parametrize(("known", "needed"), [(0, 5), (10, 5), (29, 3), (30, 3), (94, 2), (95, 2), (5000, 2)])
def test_the_less_is_known_of_an_engine_the_more_deaths_a_conviction_takes(known: int, needed: int) -> None:
    """The least k with p^k <= 0.001, p the upper bound of the engine's own rate; at most five, never one."""
    case = Case(known=known)
    verdicts = [case.dies_alone(A) for _ in range(needed)]
    assert [each.is_convicted for each in verdicts] == [False] * (needed - 1) + [True]
    assert all(each.trial is Trial.FIRST for each in verdicts[:-1])


def test_an_acquittal_of_all_leaves_the_death_unexplained() -> None:
    """Once every turn in flight at the death has ended well, the engine died of itself, or of load."""
    case = Case()
    case.start(A, B)
    case.die(A, B)
    case.start(A)
    assert case.end(A) == ()
    case.start(B)
    assert case.end(B) == (DeathUnexplained(worker="w", incarnation=2, company=2),)
    assert case.blame.record("m") == TurnRecord(acquitted=2, unexplained=1)
    assert case.dies_alone(A).charges == Charges(is_suspect=True, deaths=1)


def test_a_conviction_explains_the_death_and_clears_the_neighbours() -> None:
    """Turns of other jobs are suspects no longer. Those of the same job are tried, after all other work."""
    case = Case(known=1000)
    case.start(A, B, OTHER)
    case.die(A, B, OTHER)
    case.dies_alone(A)
    verdict = case.dies_alone(A)
    assert verdict.findings == (
        DeathExplained(worker="w", incarnation=2, key=A),
        DeathExplained(worker="w", incarnation=3, key=A),
        DeathExplained(worker="w", incarnation=4, key=A),
        SuspectsCleared(keys=(OTHER,)),
    )
    case.start(B, C)
    assert [each.trial for each in case.die(B, C)] == [Trial.LAST] * 2


def test_a_job_is_distrusted_after_two_convictions_in_a_row_until_a_turn_ends() -> None:
    """The job's next turns are the most likely causes."""
    case = Case(known=1000)
    case.dies_alone(A)
    case.dies_alone(A)
    case.dies_alone(B)
    verdict = case.dies_alone(B)
    assert verdict.findings[-1] == SourceDistrusted(source=A.job_id)
    case.start(C)
    assert case.end(C) == (SourceTrusted(source=A.job_id),)


def test_a_signal_from_outside_charges_no_turn() -> None:
    """After three of them a turn gets a trial, and only many more, each while it is alone, convict it."""
    case = Case(known=1000)
    verdicts = [case.dies_alone(A, is_outside=True) for _ in range(2)]
    assert [(each.trial, each.charges.is_suspect) for each in verdicts] == [(None, False)] * 2
    verdicts = [case.dies_alone(A, is_outside=True) for _ in range(1 + MOST_DEATHS)]
    assert [each.is_convicted for each in verdicts] == [False] * MOST_DEATHS + [True]
    assert {each.trial for each in verdicts[:-1]} == {Trial.NEXT}


def test_a_suspect_that_is_gone_leaves_the_death_unjudged() -> None:
    """Its effect can no longer be tested, so the death counts against neither the turn nor the engine."""
    case = Case()
    case.start(A, B)
    case.die(A, B)
    case.blame.forget([A])
    case.start(B)
    assert case.end(B) == ()


@given(st.integers(0, 40), st.integers(1, 200))
def test_the_bound_lies_above_the_rate_and_falls_with_evidence(faults: int, more: int) -> None:
    """The exact binomial bound is monotone in both counts, and it is used at 0.001."""
    turns = faults + more
    bound = upper_bound(faults, turns)
    assert faults / turns < bound <= 1.0
    assert upper_bound(faults, turns + 1) <= bound + 1e-9
    assert upper_bound(faults + 1, turns + 1) >= bound - 1e-9
    k = TurnRecord(acquitted=more, unexplained=faults).faults_to_convict(most=9999)
    assert bound >= 1.0 or bound**k <= DOUBT * 1.0001


def test_a_worker_that_dies_under_load_gets_fewer_slots_and_later_more_again() -> None:
    """Each death at a number of slots doubles the wait before that number is tried again."""
    limits = LoadLimits()
    assert limits.lower("w", 4) == 3
    assert limits.lower("w", 3) == 2
    raised = [limits.learn_from_end("w", 2, 4) for _ in range(2 * PROBATION)]
    assert raised == [None] * (2 * PROBATION - 1) + [3]
    assert [limits.learn_from_end("w", 2, 4) for _ in range(500)] == [None] * 500  # never full: it proves nothing
    assert limits.lower("w", 3) == 2
    raised = [limits.learn_from_end("w", 2, 4) for _ in range(4 * PROBATION)]
    assert raised[-1] == 3
    assert raised[:-1] == [None] * (4 * PROBATION - 1)
    assert limits.learn_from_end("other", 9, 4) is None
