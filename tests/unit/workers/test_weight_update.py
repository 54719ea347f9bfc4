"""Decisions of a weight update, event by event: pure, so that each case is compared whole."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workers
from workers.policy.weight_update import (
    DOING,
    STAGES,
    BeginStep,
    CommitVersion,
    EndPhase,
    Failure,
    HurryReceivers,
    KillWorker,
    StepEnded,
    StepFailed,
    TakeBack,
    TakeBackFailed,
    UpdateAction,
    UpdateBegun,
    UpdateEvent,
    UpdateProgress,
    UpdateStage,
    UpdateState,
    VersionCommitted,
    WorkerPart,
    decide,
    diagram,
)
from workers.policy.weights import UpdateMode, UpdatePhase

DESIGN = Path(workers.__file__).parent / "design.md"
PAUSE, START, RECEIVE, FINISH, RESUME = UpdatePhase


class Update:
    """One update of two workers and the actions it asked for, event by event."""

    def __init__(
        self,
        *names: str,
        needs_all: bool = True,
        is_staged: bool = True,
        mode: UpdateMode = UpdateMode.KEEP,
    ) -> None:
        parts = {name: WorkerPart() for name in names}
        self.now = UpdateProgress(mode=mode, needs_all=needs_all, is_staged=is_staged, parts=parts)

    def tell(self, event: UpdateEvent) -> tuple[UpdateAction, ...]:
        before = self.now.parts
        self.now, actions = decide(self.now, event)
        for name, part in self.now.parts.items():
            reachable = {before[name].stage, *STAGES[before[name].stage]}
            assert part.stage in reachable.union(
                *(STAGES[stage] for stage in reachable)
            )  # the last one begins the next
        return actions

    def ends(self, *names: str) -> tuple[UpdateAction, ...]:
        actions: tuple[UpdateAction, ...] = ()
        for name in names:
            actions = self.tell(StepEnded(worker=name))
        return actions

    def fails(self, name: str, failure: Failure = Failure.BROKEN, *, is_gone: bool = False) -> tuple[UpdateAction, ...]:
        return self.tell(StepFailed(worker=name, failure=failure, detail="why", is_gone=is_gone))

    def reach(self, phase: UpdatePhase) -> "Update":
        """Take all workers to the beginning of a phase."""
        self.tell(UpdateBegun())
        while self.now.phase is not phase:
            if self.now.is_committing:
                self.tell(VersionCommitted())
            else:
                self.ends(*self.now.survivors)
        return self


def begin(phase: UpdatePhase, *names: str) -> tuple[UpdateAction, ...]:
    return tuple(BeginStep(worker=name, phase=phase) for name in names)


def test_phases_follow_one_another_behind_barriers() -> None:
    """None begins before every worker has ended the one before; the version is committed before any worker resumes."""
    update = Update("a", "b")
    assert update.tell(UpdateBegun()) == begin(PAUSE, "a", "b")
    for phase, after in ((PAUSE, START), (START, RECEIVE), (RECEIVE, FINISH)):
        assert update.ends("b") == ()
        assert update.ends("a") == (EndPhase(phase=phase, is_whole=True), *begin(after, "a", "b"))
    assert update.ends("a", "b") == (EndPhase(phase=FINISH, is_whole=True), CommitVersion())
    assert update.now.state is UpdateState.RUNNING
    assert update.tell(VersionCommitted()) == begin(RESUME, "a", "b")
    assert update.ends("a", "b") == (EndPhase(phase=RESUME, is_whole=True),)
    assert (update.now.state, update.now.error) == (UpdateState.COMPLETED, None)
    assert [part.stage for part in update.now.parts.values()] == [UpdateStage.SERVING, UpdateStage.SERVING]


@pytest.mark.parametrize(
    ("phase", "is_staged", "mode", "failure", "is_killed"),
    [
        (PAUSE, True, UpdateMode.KEEP, Failure.BROKEN, True),
        (PAUSE, True, UpdateMode.KEEP, Failure.TIMED_OUT, True),
        (PAUSE, True, UpdateMode.WAIT, Failure.TIMED_OUT, False),  # its requests went on, and nothing else is wrong
        (PAUSE, True, UpdateMode.WAIT, Failure.BROKEN, True),
        (PAUSE, True, UpdateMode.KEEP, Failure.NO_PAUSE, False),
        (START, True, UpdateMode.KEEP, Failure.BROKEN, False),  # it has all of its old weights
        (START, False, UpdateMode.KEEP, Failure.BROKEN, True),
        (RECEIVE, True, UpdateMode.KEEP, Failure.TIMED_OUT, False),
        (RECEIVE, False, UpdateMode.KEEP, Failure.TIMED_OUT, True),
        (FINISH, True, UpdateMode.KEEP, Failure.BROKEN, True),
        (RESUME, True, UpdateMode.KEEP, Failure.TIMED_OUT, True),
    ],
)
def test_which_workers_are_killed_after_a_failure(
    phase: UpdatePhase, mode: UpdateMode, failure: Failure, *, is_staged: bool, is_killed: bool
) -> None:
    """Only an engine whose weights may be half changed, or that may never go on."""
    update = Update("a", "b", needs_all=False, is_staged=is_staged, mode=mode).reach(phase)
    actions = update.fails("a", failure)
    assert actions == ((KillWorker(worker="a", because=f"{phase}: why"),) if is_killed else ())
    part = update.now.parts["a"]
    assert (part.stage, part.error) == (UpdateStage.FAILED, f"{phase}: why")
    assert part.is_left_out is (is_killed or failure is Failure.NO_PAUSE)


def test_a_worker_missing_before_a_broadcast_takes_all_back() -> None:
    """A rank that never joins would block the others until their limit."""
    update = Update("a", "b").reach(START)
    assert update.fails("a") == ()
    assert update.ends("b") == (EndPhase(phase=START, is_whole=False), TakeBack(worker="a"), TakeBack(worker="b"))
    assert (update.now.state, update.now.error) == (UpdateState.FAILED, "a: start: why")


def test_a_silent_trainer_is_named() -> None:
    """A worker that waits for the trainer beside a failed worker is told to hurry, and does not count as late."""
    update = Update("a", "b").reach(RECEIVE)
    assert update.fails("a", Failure.TIMED_OUT) == (HurryReceivers(),)
    assert update.fails("b", Failure.TIMED_OUT) == (
        HurryReceivers(),
        EndPhase(phase=RECEIVE, is_whole=False),
        TakeBack(worker="a"),
        TakeBack(worker="b"),
    )
    assert [part.is_late for part in update.now.parts.values()] == [True, False]
    assert update.now.error == (
        "the trainer (rank 0) has not sent everything: a: receive: why; b: receive: given up after a had failed"
    )


def test_an_engine_that_died_is_to_blame_and_not_the_trainer() -> None:
    """Nothing of the engine has to be taken back."""
    update = Update("a", "b").reach(RECEIVE)
    update.fails("a", is_gone=True)
    assert update.fails("b", Failure.TIMED_OUT)[-1] == TakeBack(worker="b")
    assert update.now.error == "a: receive: why; b: receive: given up after a had failed"


def test_a_version_that_one_worker_has_becomes_the_models() -> None:
    """Workers that failed are killed once the version is committed, and load it when they start again."""
    update = Update("a", "b").reach(RECEIVE)
    update.fails("a")
    assert update.ends("b") == (EndPhase(phase=RECEIVE, is_whole=False), *begin(FINISH, "b"))
    assert update.ends("b")[-1] == CommitVersion()
    assert update.tell(VersionCommitted()) == (KillWorker(worker="a", because="receive: why"), *begin(RESUME, "b"))
    update.ends("b")
    assert (update.now.state, update.now.error) == (UpdateState.PARTIAL, "a: receive: why")


def test_a_worker_that_cannot_go_back_is_killed() -> None:
    """Its answers would be undefined."""
    update = Update("a").reach(START)
    assert update.fails("a") == (EndPhase(phase=START, is_whole=False), TakeBack(worker="a"))
    because = "it cannot go on with its old weights: no answer"
    assert update.tell(TakeBackFailed(worker="a", detail="no answer")) == (KillWorker(worker="a", because=because),)


def test_without_workers_an_update_fails_at_once() -> None:
    """All may have left while it was prepared."""
    update = Update()
    assert update.tell(UpdateBegun()) == ()
    assert (update.now.state, update.now.error) == (UpdateState.FAILED, "no worker was left")


@given(st.data())
def test_every_update_ends_and_leaves_no_worker_between_two_weights(data: st.DataObject) -> None:
    """Whatever fails, in any order: each worker serves the new version, goes back to the old one, or is killed."""
    update = Update(
        *("a", "b", "c")[: data.draw(st.integers(1, 3))],
        needs_all=data.draw(st.booleans()),
        is_staged=data.draw(st.booleans()),
        mode=data.draw(st.sampled_from(UpdateMode)),
    )
    seen = list(update.tell(UpdateBegun()))
    while update.now.state is UpdateState.RUNNING:
        if update.now.is_committing:
            seen += update.tell(VersionCommitted())
            continue
        at_it = [name for name, part in update.now.parts.items() if part.stage is DOING[update.now.phase]]
        name = data.draw(st.sampled_from(at_it))
        failure = data.draw(st.sampled_from([None, None, Failure.TIMED_OUT, Failure.BROKEN]))
        seen += update.ends(name) if failure is None else update.fails(name, failure)
    killed = {action.worker for action in seen if isinstance(action, KillWorker)}
    taken_back = {action.worker for action in seen if isinstance(action, TakeBack)}
    serving = {name for name, part in update.now.parts.items() if part.stage is UpdateStage.SERVING}
    assert killed | taken_back | serving == set(update.now.parts)
    assert not taken_back & serving
    assert bool(serving) <= (CommitVersion() in seen)


def test_the_diagram_in_the_design_notes_is_the_table() -> None:
    """A reader of the notes reads what the code allows."""
    assert f"```mermaid\n{diagram()}\n```" in DESIGN.read_text(encoding="utf-8")
