"""Distrust of keys: turns of a distrusted key are tried alone before they run beside others."""

import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId, TurnKey
from service.conversations.record.transcript import Charges
from service.scheduling.core.blame import (
    JUST_S,
    TRUSTED_ENDS,
    TRUSTED_S,
    Blame,
    DeathUnexplained,
    SourceDistrusted,
    SourceTrusted,
    Trial,
)
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import Action, JobAdmitted, StartTurn, TurnCompleted, TurnSpent, WorkerReady
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue.affinity import PromptReading
from tests.harness.jobs import agent, job
from workers.health.recovery import SHORTLY_S

MALLORY, ALICE = ("mallory", "m"), ("alice", "m")


def turn(owner: str, number: int) -> TurnKey:
    return TurnKey(JobId(f"{owner}-{number}"), "c0", "a", 0)


class Requests:
    """Requests of keys at one worker's engines, each a job of one turn."""

    def __init__(self, known: int = 1000) -> None:
        self.blame = Blame(lambda job_id: job_id.partition("-")[0])
        self.incarnation, self.now, self.number = 1, 0.0, 0
        for _ in range(known):
            self.serve("nobody")

    def begin(self, owner: str) -> TurnKey:
        self.number += 1
        self.now += 10.0
        key = turn(owner, self.number)
        self.blame.start(key, "m", "w", self.incarnation)
        return key

    def serve(self, owner: str) -> tuple[object, ...]:
        """Have one request answered by an engine that survives it."""
        found = self.blame.acquit(self.begin(owner), Charges(), self.now)
        self.now += JUST_S
        return (*found, *self.blame.expire(self.now))

    def kill(self, owner: str) -> list[object]:
        """Have one request's engine die, with the request alone on it, until the request is convicted."""
        found: list[object] = []
        key, charges, is_convicted = self.begin(owner), Charges(), False
        while not is_convicted:
            verdict = self.blame.die(key, charges, is_outside=False, at=self.now)
            found += verdict.findings
            charges, is_convicted = verdict.charges, verdict.is_convicted
            self.incarnation += 1
            if not is_convicted:
                self.blame.start(key, "m", "w", self.incarnation)
        return found

    def leave(self, owner: str, dies_after_s: float) -> list[object]:
        """Have a client disconnect, and the idle engine die this much later."""
        self.blame.end_unproven(self.begin(owner), is_cut_off=True, at=self.now)
        found = self.blame.note_gone("m", "w", self.incarnation, self.now + dies_after_s)
        self.incarnation += 1
        return list(found)


def test_a_key_is_distrusted_after_a_conviction_whatever_its_jobs() -> None:
    """Each front door request is a job of its own, so distrust of jobs would never apply to a later one."""
    case = Requests()
    assert SourceDistrusted(source=MALLORY) in case.kill("mallory")
    key = case.begin("mallory")
    other = case.begin("alice")
    assert case.blame.die(key, Charges(), is_outside=False, at=case.now).trial is Trial.LAST
    assert case.blame.die(other, Charges(), is_outside=False, at=case.now).trial is Trial.NEXT


def test_one_good_end_clears_a_keys_first_conviction_but_not_its_second() -> None:
    """One prompt that kills engines may be an accident; a second one is not."""
    case = Requests()
    case.kill("mallory")
    assert case.serve("mallory") == (SourceTrusted(source=MALLORY),)
    assert SourceDistrusted(source=MALLORY) in case.kill("mallory")
    assert case.serve("mallory") == ()


def test_a_turn_of_a_distrusted_key_needs_no_fresh_engine_for_its_trial() -> None:
    """It is tried when its turn comes, on an engine that has served others: its first death alone counts."""
    case = Requests()
    case.kill("mallory")
    aboard = [case.begin("alice"), case.begin("alice")]
    for each in aboard:
        case.blame.acquit(each, Charges(), case.now)
    verdict = case.blame.die(case.begin("mallory"), Charges(), is_outside=False, at=case.now)
    assert (verdict.trial, verdict.charges.deaths) == (Trial.FIRST, 1)


def test_a_turn_that_was_just_answered_is_no_suspect_where_others_were_in_flight() -> None:
    """A key that is always being served has always just been answered."""
    case = Requests()
    for _ in range(9):
        case.blame.acquit(case.begin("alice"), Charges(), case.now)
        killer = case.begin("mallory")
        found = case.blame.die(killer, Charges(), is_outside=False, at=case.now).findings
        assert SourceDistrusted(source=ALICE) not in found
        case.incarnation += 1


def test_a_key_is_trusted_again_after_fifty_good_ends_in_a_row() -> None:
    """A good end between convictions does not count."""
    case = Requests()
    case.kill("mallory")
    case.kill("mallory")
    for _ in range(TRUSTED_ENDS - 1):
        assert case.serve("mallory") == ()
    case.kill("mallory")
    for _ in range(TRUSTED_ENDS - 1):
        assert case.serve("mallory") == ()
    assert case.serve("mallory") == (SourceTrusted(source=MALLORY),)


def test_a_key_is_trusted_again_after_an_hour() -> None:
    """The hour has to pass without a conviction."""
    case = Requests()
    case.kill("mallory")
    case.kill("mallory")
    assert case.blame.expire(0.0) == ()
    assert case.blame.expire(TRUSTED_S - 1) == ()
    assert case.blame.expire(TRUSTED_S) == (SourceTrusted(source=MALLORY),)


def test_a_turn_cut_off_shortly_before_a_death_keeps_its_key_a_suspect() -> None:
    """Hit and run: the client has gone and its request cannot be tried, but its key can."""
    case = Requests()
    found = [each for _ in range(4) for each in case.leave("mallory", 0.2)]
    assert found == [SourceDistrusted(source=MALLORY)]


@pytest.mark.parametrize("innocent", ["leaves long before", "is served as a rule"])
def test_an_innocent_key_stays_trusted(innocent: str) -> None:
    """Clients stop answers every day, and engines die of themselves."""
    case = Requests()
    for _ in range(10):
        for _ in range(3 if innocent == "is served as a rule" else 0):
            case.serve("alice")
        after_s = 0.2 if innocent == "is served as a rule" else SHORTLY_S + 1
        assert case.leave("alice", after_s) == []


def test_a_death_after_a_client_has_left_is_not_explained_by_the_turns_in_flight() -> None:
    """Their trials end well, and yet the engine did not die of load: no worker's slots are reduced for it."""
    case = Requests()
    aboard = [case.begin("alice"), case.begin("alice")]
    case.blame.end_unproven(case.begin("mallory"), is_cut_off=True, at=case.now)
    for key in aboard:
        case.blame.die(key, Charges(), is_outside=False, at=case.now + 0.2)
    case.incarnation += 1
    found: list[object] = []
    for key in aboard:
        case.blame.start(key, "m", "w", case.incarnation)
        found += case.blame.acquit(key, Charges(), case.now + 10)
    assert not [each for each in found if isinstance(each, DeathUnexplained)]


def test_a_trial_right_after_another_answer_proves_nothing() -> None:
    """An engine may die of the answer before, during the next request."""
    case = Requests()
    case.blame.acquit(case.begin("mallory"), Charges(), case.now)
    victim = turn("alice", 999)
    case.blame.start(victim, "m", "w", case.incarnation)
    verdict = case.blame.die(victim, Charges(), is_outside=False, at=case.now + 0.1)
    assert (verdict.charges.deaths, verdict.is_convicted) == (0, False)


def starts(actions: list[Action]) -> list[StartTurn]:
    return [action for action in actions if isinstance(action, StartTurn)]


def test_new_work_of_a_distrusted_key_is_tried_after_others() -> None:
    """Its trial runs alone, after others' turns, which go on meanwhile."""
    core = SchedulingCore(POLICIES["fifo"], shares={"alice": 1.0, "mallory": 1.0})
    core.handle(WorkerReady(worker="w", model="m", slots=2))
    core.handle(SourceDistrusted(source=MALLORY))
    bad = replace(job(agent("a"), name="bad"), owner="mallory")
    good = replace(job(agent("a"), name="good", conversations=100), owner="alice")
    aboard = starts(core.handle(JobAdmitted(job=bad), JobAdmitted(job=good)))
    assert [each.key.job_id for each in aboard] == ["good", "good"]
    for _ in range(60):
        aboard += starts(core.handle(TurnCompleted(key=aboard.pop(0).key)))
        assert len({each.is_suspect for each in aboard}) == 1
        if aboard[0].is_suspect:
            break
    assert [each.key.job_id for each in aboard] == ["bad"]


def test_a_reserved_slot_is_charged_even_without_an_answer() -> None:
    """A client that leaves early has used its slot nevertheless: its seconds are charged at the model's speed."""
    core = SchedulingCore(POLICIES["fifo"], shares={"alice": 1.0, "mallory": 1.0})
    core.handle(WorkerReady(worker="w", model="m", slots=1))
    jobs = [replace(job(agent("a"), name=owner, conversations=100), owner=owner) for owner in ("alice", "mallory")]
    taken = {"alice": 0.0, "mallory": 0.0}
    running = starts(core.handle(*(JobAdmitted(job=each) for each in jobs)))[0].key
    for _ in range(60):
        owner = running.job_id
        seconds = 2.0 if owner == "mallory" else 1.0
        taken[owner] += seconds
        tokens = 0 if owner == "mallory" else 10
        reading = PromptReading(fresh_tokens=0, seconds=0, context_tokens=10, answer_tokens=10) if tokens else None
        told = TurnSpent(key=running, fresh_tokens=0, answer_tokens=tokens, seconds=seconds, is_told=owner == "alice")
        ended = TurnCompleted(key=running, seconds=seconds if reading else None, reading=reading)
        (started,) = starts(core.handle(told, ended))
        running = started.key
    assert 0.7 < taken["alice"] / taken["mallory"] < 1.4


def test_an_answer_that_kills_its_engine_is_no_good_end() -> None:
    """Otherwise a request that is answered and then kills would earn trust."""
    case = Requests()
    case.kill("mallory")
    found: list[object] = []
    for _ in range(3):
        found += case.blame.acquit(case.begin("mallory"), Charges(), case.now)
        found += case.blame.note_gone("m", "w", case.incarnation, case.now + 0.1)
        case.incarnation += 1
    assert SourceTrusted(source=MALLORY) not in found
