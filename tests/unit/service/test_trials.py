from msgspec.structs import replace

from service.scheduling.core.blame import SourceDistrusted, SuspectsCleared, Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import (
    Action,
    JobAdmitted,
    StartTurn,
    TimeTold,
    TurnCompleted,
    TurnFailed,
    TurnInterrupted,
    WorkerNotReady,
    WorkerReady,
)
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.trials import STARTS_A_SLOT, STARTS_BEFORE_LAST, TRIALS_IN_A_ROW
from tests.harness.jobs import agent, job, key


def ready(worker: str = "w", slots: int = 3) -> WorkerReady:
    return WorkerReady(worker=worker, model="m", slots=slots)


def starts(actions: list[Action]) -> list[tuple[str, str, bool]]:
    return [
        (action.key.conversation_id, action.worker, action.is_suspect)
        for action in actions
        if isinstance(action, StartTurn)
    ]


def broken(conversations: int, suspects: int, *workers: str, slots: int = 3) -> SchedulingCore:
    """Return a core whose worker w died with this many suspect turns on it, beside these other workers."""
    made = SchedulingCore(POLICIES["progress"])
    made.handle(ready(slots=suspects), JobAdmitted(job=job(agent("a"), conversations=conversations)))
    made.handle(WorkerNotReady(worker="w", returns=True))
    for worker in workers:
        made.handle(ready(worker, slots))
    for number in range(suspects):
        made.handle(TurnInterrupted(key=key("a", 0, number), trial=Trial.NEXT))
    return made


def test_suspects_are_tried_one_after_the_other_on_the_restarted_engine() -> None:
    """It is empty; the other worker goes on with all other turns."""
    core = broken(9, 3, "v", slots=2)
    assert starts(core.handle(ready(slots=3))) == [("c0", "w", True)]
    assert starts(core.handle(TurnCompleted(key=key("a", 0, 3)))) == [("c5", "v", False)]
    assert starts(core.handle(TurnCompleted(key=key("a", 0, 0)))) == [("c1", "w", True)]
    assert starts(core.handle(TurnCompleted(key=key("a", 0, 1)))) == [("c2", "w", True)]
    # The last of them has ended: the worker takes any turn again.
    assert starts(core.handle(TurnCompleted(key=key("a", 0, 2)))) == [(f"c{n}", "w", False) for n in (6, 7, 8)]


def test_a_turn_that_died_alone_is_first_on_the_next_engine() -> None:
    """The engine has served nothing before, so nothing else can be the cause."""
    core = broken(3, 3, slots=3)
    core.handle(ready())
    core.handle(WorkerNotReady(worker="w", returns=True))
    core.handle(TurnInterrupted(key=key("a", 0, 0), trial=Trial.FIRST))
    assert starts(core.handle(ready())) == [("c0", "w", True)]


def test_with_one_worker_trials_and_waiting_turns_alternate() -> None:
    """After four trials in a row four waiting turns per slot start, and then trials go on."""
    core = broken(60, 9, slots=1)
    actions = core.handle(ready(slots=1))
    kinds = []
    for _ in range(2 * TRIALS_IN_A_ROW + STARTS_A_SLOT):
        ((conversation, _, is_suspect),) = starts(actions)
        kinds.append(is_suspect)
        actions = core.handle(TurnCompleted(key=key("a", 0, int(conversation[1:]))))
    assert kinds == [True] * TRIALS_IN_A_ROW + [False] * STARTS_A_SLOT + [True] * TRIALS_IN_A_ROW


def test_a_busy_worker_is_drained_for_trials_if_none_restarts() -> None:
    """Suspects are not left waiting because no worker is ever empty."""
    core = broken(9, 1, "v", slots=2)
    assert starts(core.handle(WorkerNotReady(worker="w"))) == []  # it has given up
    assert starts(core.handle(TurnCompleted(key=key("a", 0, 1)))) == []
    assert starts(core.handle(TurnCompleted(key=key("a", 0, 2)))) == [("c0", "v", True)]


def test_turns_of_a_distrusted_job_are_tried_after_all_others() -> None:
    """Sixteen waiting turns per slot start before each of them; without others they are tried at once."""
    core = SchedulingCore(POLICIES["fifo"])
    bad = job(agent("a"), conversations=2, name="bad")
    core.handle(JobAdmitted(job=bad), SourceDistrusted(source=bad.id))
    core.handle(JobAdmitted(job=job(agent("a"), conversations=40)))
    actions, kinds = core.handle(ready(slots=1)), []
    while actions:
        (start,) = [action for action in actions if isinstance(action, StartTurn)]
        kinds.append(start.is_suspect)
        actions = [action for action in core.handle(TurnCompleted(key=start.key)) if isinstance(action, StartTurn)]
    first, second = (place for place, is_suspect in enumerate(kinds) if is_suspect)
    assert len(kinds) == 42
    assert second - first > STARTS_BEFORE_LAST


def test_a_conviction_postpones_the_other_suspects_of_its_job() -> None:
    """Suspects of other jobs are tried first."""
    core = broken(2, 2, slots=1)
    core.handle(JobAdmitted(job=job(agent("a"), name="k")))
    core.handle(ready(slots=1))
    core.handle(WorkerNotReady(worker="w", returns=True))
    core.handle(TurnFailed(key=key("a"), reason="poisoned"))
    assert starts(core.handle(ready(slots=1)))[0][2] is False
    assert starts(core.handle(TurnCompleted(key=key("a", name="k")))) == [("c1", "w", True)]


def test_cleared_suspects_go_ahead_of_turns_that_were_on_no_slot() -> None:
    """Another turn explains the death."""
    core = broken(9, 2, slots=1)
    core.handle(SuspectsCleared(keys=(key("a", 0, 1),)))
    assert [(turn.conversation_id, suspect) for turn, suspect in core.view.queues.ready_heads(2)] == [
        ("c0", True),
        ("c1", False),
    ]
    actions = core.handle(SuspectsCleared(keys=(key("a", 0, 0),)), ready(slots=2))
    assert starts(actions) == [("c1", "w", False), ("c0", "w", False)]


def test_a_worker_drained_and_resumed_in_mid_trial_takes_no_other_turn() -> None:
    """A weight update drains it. The suspect is still there, and a death with others in flight would prove nothing."""
    core = broken(3, 1, "v", slots=1)
    assert starts(core.handle(ready(slots=2))) == [("c0", "w", True)]
    core.handle(WorkerNotReady(worker="w"))
    assert starts(core.handle(ready(slots=2))) == []
    assert starts(core.handle(TurnCompleted(key=key("a", 0, 0)))) == [("c2", "w", False)]


def test_between_trials_of_a_distrusted_key_others_run_three_times_as_long() -> None:
    """Three times as long as the trial and the start of its engine took.

    The core gets the time while keys are distrusted.
    """
    core = SchedulingCore(POLICIES["fifo"], shares={"alice": 1.0, "mallory": 1.0})
    core.handle(TimeTold(at=100.0), ready(slots=1), SourceDistrusted(source=("mallory", "m")))
    bad = replace(job(agent("a"), conversations=3, name="bad"), owner="mallory")
    good = replace(job(agent("a"), conversations=1000, name="good"), owner="alice")
    actions = core.handle(JobAdmitted(job=bad), JobAdmitted(job=good))
    tried_at, now, rests = [], 100.0, []
    for _ in range(600):
        (start,) = [action for action in actions if isinstance(action, StartTurn)]
        now += 10.0 if start.is_suspect else 0.5
        if start.is_suspect:
            tried_at.append(now)
        core.handle(TimeTold(at=now))
        actions = core.handle(TurnCompleted(key=start.key))
        rests.append(core.rests_until("m"))
    assert len(tried_at) == 3
    first, second, third = tried_at
    assert second - first >= 40.0
    assert third - second >= 40.0
    assert {rest for rest in rests if rest is not None} == {first + 30.0, second + 30.0, third + 30.0}


def test_without_others_a_distrusted_key_does_not_wait() -> None:
    """Its turns are tried one after the other."""
    core = SchedulingCore(POLICIES["fifo"], shares={"alice": 1.0, "mallory": 1.0})
    core.handle(TimeTold(at=100.0), ready(), SourceDistrusted(source=("mallory", "m")))
    bad = replace(job(agent("a"), conversations=9, name="bad"), owner="mallory")
    actions = core.handle(JobAdmitted(job=bad))
    for number in range(9):
        assert starts(actions) == [(f"c{number}", "w", True)]
        actions = core.handle(TimeTold(at=101.0 + number), TurnCompleted(key=key("a", 0, number, name="bad")))
