"""Which workers of a model are its spares, decided without an engine."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from workers.members import Family, RosterMember
from workers.notifier import Notifier
from workers.policy.lifecycle import DrainRequested, EngineGone, StartTimer, TimerElapsed, decide
from workers.policy.lifecycle_state import Lifecycle, LifecycleLimits
from workers.policy.restart import RestartPolicy
from workers.policy.spares import (
    EngineMemory,
    HostMemory,
    SpareChange,
    SpareStep,
    SpareView,
    auto_fault,
    decide_spares,
)
from workers.spare_engines import SpareEngines, engine_memory
from workers.spec import EngineKind, WorkerSpec
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker
from workers.upkeep import ModelUpkeep

ACTIVE = SpareView(number=0, takes_turns=True, is_wanted=True)
DOWN = SpareView(number=0, is_wanted=True)
READY = SpareView(number=1, is_spare=True, is_usable=True, is_wanted=True)
LOADING = SpareView(number=1, is_spare=True, is_wanted=True)
IDLE = SpareView(number=1, is_spare=True)


def steps(*workers: SpareView, replicas: int = 1, spares: int = 1) -> list[tuple[int, SpareChange]]:
    return [(step.number, step.change) for step in decide_spares(workers, replicas, spares)]


def test_a_spare_starts_once_the_model_is_served() -> None:
    """The start of an engine that is waited for is never delayed by a spare's."""
    assert steps(DOWN, IDLE) == []
    assert steps(ACTIVE, IDLE) == [(1, SpareChange.START)]
    assert steps(ACTIVE, LOADING) == []
    assert steps(ACTIVE, READY) == []


def test_a_ready_spare_changes_roles_with_a_worker_that_is_down() -> None:
    """One that still loads does not."""
    assert steps(DOWN, READY) == [(1, SpareChange.TAKE), (0, SpareChange.HOLD)]
    assert steps(DOWN, LOADING) == []


def test_a_spare_serves_where_workers_are_missing() -> None:
    """It is taken although it is not ready: after a reload to more replicas, or an upgrade, no other is there."""
    assert steps(LOADING) == [(1, SpareChange.TAKE)]
    assert steps(IDLE) == [(1, SpareChange.TAKE)]
    assert steps(ACTIVE, IDLE, replicas=2, spares=0) == [(1, SpareChange.TAKE)]
    assert steps(replace(LOADING, number=0), replace(IDLE, number=2)) == [(0, SpareChange.TAKE)]


def test_a_spare_takes_one_place() -> None:
    """With two workers down and one spare, one of them stays what it is."""
    down = replace(DOWN, number=1)
    spare = replace(READY, number=2)
    assert steps(DOWN, down, spare, replicas=2) == [(2, SpareChange.TAKE), (1, SpareChange.HOLD)]
    assert steps(ACTIVE, down, spare, replicas=2) == [(2, SpareChange.TAKE), (1, SpareChange.HOLD)]


def test_a_spare_that_is_not_allowed_ends() -> None:
    """One that is not usable ends first."""
    second = replace(LOADING, number=2)
    assert steps(ACTIVE, READY, spares=0) == [(1, SpareChange.STOP)]
    assert steps(ACTIVE, READY, second, spares=1) == [(2, SpareChange.STOP)]
    assert steps(ACTIVE, IDLE, spares=0) == []


def test_a_worker_in_excess_becomes_a_spare() -> None:
    """The one with the fewest requests, if all take turns."""
    busy = replace(ACTIVE, number=1, in_use=3)
    assert steps(ACTIVE, busy) == [(0, SpareChange.HOLD)]


def follow(workers: Iterable[SpareView], step: SpareStep) -> list[SpareView]:
    """Return the workers after a step, engines included: one that starts is ready at once."""

    def moved(each: SpareView) -> SpareView:
        if each.number != step.number:
            return each
        match step.change:
            case SpareChange.TAKE:
                return replace(each, is_spare=False, is_usable=False, takes_turns=True, is_wanted=True)
            case SpareChange.HOLD:
                return replace(each, is_spare=True, is_usable=each.takes_turns, takes_turns=False)
            case SpareChange.START:
                return replace(each, is_wanted=True, is_usable=True)
            case SpareChange.STOP:
                return replace(each, is_wanted=False, is_usable=False)

    return [moved(each) for each in workers]


@st.composite
def drawn_workers(draw: st.DrawFn) -> list[SpareView]:
    states = draw(st.lists(st.sampled_from([ACTIVE, DOWN, READY, LOADING, IDLE]), min_size=1, max_size=6))
    return [replace(each, number=number) for number, each in enumerate(states)]


@given(drawn_workers(), st.integers(1, 3), st.integers(0, 3))
def test_the_steps_come_to_rest_with_as_many_workers_at_turns_as_can_be(
    workers: list[SpareView], replicas: int, spares: int
) -> None:
    """No usable spare waits while a place is free, and no more workers than replicas take turns."""
    able = sum(each.takes_turns or (each.is_spare and each.is_usable) for each in workers)
    for _ in range(4 * len(workers)):
        decided = decide_spares(workers, replicas, spares)
        for step in decided:
            workers = follow(workers, step)
        if not decided:
            break
    else:
        raise AssertionError(workers)
    serving = [each for each in workers if not each.is_spare]
    assert len(serving) == min(replicas, len(workers))
    assert sum(each.takes_turns for each in serving) >= min(replicas, able)
    assert sum(each.is_spare and each.is_wanted for each in workers) <= spares


def test_a_broken_engine_starts_later_if_a_spare_has_taken_its_place() -> None:
    """The spare reads the halves of all streams first; a longer pause stays."""
    for failures, after_s in ((1, 5.0), (4, 8.0)):
        limits = LifecycleLimits(start_s=60, stop_grace_s=5, restart=RestartPolicy())
        waits = Lifecycle(state=WorkerState.BACKOFF, paused_at=(0.0,) * failures, timer=7)
        held, actions = decide(waits, DrainRequested(because="a spare", hold=Hold.SPARE), 0.0, limits)
        assert (held.timer, actions) == (8, (StartTimer(timer=8, after_s=after_s),))
        assert decide(held, TimerElapsed(timer=7), 0.0, limits)[0].state is WorkerState.BACKOFF
        assert decide(held, TimerElapsed(timer=8), 0.0, limits)[0].state is WorkerState.STARTING


def test_a_killed_engine_waits_for_the_spare_as_well() -> None:
    """Its worker became a spare while it was being killed."""
    limits = LifecycleLimits(start_s=60, stop_grace_s=5, restart=RestartPolicy())
    killed = Lifecycle(
        state=WorkerState.STOPPING, incarnation=1, has_process=True, is_wanted=True, holds=frozenset({Hold.SPARE})
    )
    gone, actions = decide(killed, EngineGone(incarnation=1, because="silent", jitter=0.5), 0.0, limits)
    assert gone.state is WorkerState.BACKOFF
    assert [each.after_s for each in actions if isinstance(each, StartTimer)] == [5.0]


@pytest.mark.parametrize(
    ("has_tasks", "is_drained", "starts"), [(True, False, True), (False, False, False), (True, True, False)]
)
async def test_a_spare_starts_once_it_can_and_may(*, has_tasks: bool, is_drained: bool, starts: bool) -> None:
    """One that joins while its model's upkeep is busy has no tasks yet; an operator's drain lasts."""
    spec = WorkerSpec(engine=EngineKind.EMBEDDED, spares=1)
    worker = SupervisedWorker(spec)
    member = RosterMember(worker, spec, 0, ModelUpkeep([worker], state_dir=None, observe=lambda *_: None))
    worker.drain_nowait("a spare", Hold.SPARE)
    if is_drained:
        worker.drain_nowait("drained by an operator")
    if has_tasks:
        member.is_there.set()
    started: list[SupervisedWorker] = []
    families = [Family(spec, 1, [member])]
    SpareEngines(lambda: families, lambda each, _: started.append(each), Notifier(), has_lanes=False).assign()
    assert started == [worker] * starts
    assert (Hold.OPERATOR in worker.now.holds) is is_drained


def test_weights_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    """A hub's cache names files by their digests."""
    file = tmp_path / ("0" * 64)
    file.write_bytes(b"GGUF" + bytes((4 << 20) - 4))
    code = (
        f"import mmap; file = open({str(file)!r}, 'rb'); mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ);"
        "sum(mapped[::4096]); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        memory = engine_memory(os.getpid())
        reader.communicate(b"\n")
    assert (memory.mapped_mib, memory.weights_mib) == (4, 4)


ENGINE = EngineMemory(own_mib=1000, mapped_mib=4000, weights_mib=4000)


@pytest.mark.parametrize(
    ("engine", "free_mib", "is_running", "fault"),
    [
        (ENGINE, 4000, False, None),
        (ENGINE, 2599, False, "2599 MiB of memory are free, of 2600 MiB needed"),
        (ENGINE, 2599, True, None),
        (ENGINE, 799, True, "799 MiB of memory are free, of 800 MiB needed"),
        (replace(ENGINE, mapped_mib=3399), 9000, False, "only 3399 MiB would be shared"),
        (replace(ENGINE, mapped_mib=0, weights_mib=0), 9000, False, "only 0 MiB would be shared"),
    ],
)
def test_an_automatic_spare_needs_shared_weights_and_free_memory(
    engine: EngineMemory, free_mib: int, is_running: bool, fault: str | None
) -> None:
    """A running one is kept for longer than a new one is begun."""
    found = auto_fault(engine, HostMemory(free_mib=free_mib, total_mib=16_000), is_running=is_running)
    assert (found is None) if fault is None else fault in str(found)
