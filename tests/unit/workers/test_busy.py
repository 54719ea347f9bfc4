"""An engine that computes a long batch on the CPU: it answers nothing, and is healthy."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from tests.harness.virtual import pass_time, virtually
from tests.harness.watching import MINUTE, Watching
from transport.counters import EngineCounters, SlotWork
from transport.events import PromptProgress, TextDelta
from workers.engine.launch.devices import BUSY_STALL_S, computes_on_cpu, embedded_has_gpu, has_gpu, placed
from workers.health.calibration import EngineCalibration
from workers.health.evidence import Observations
from workers.health.probes import Calibration
from workers.requests.in_flight import InFlightRequest
from workers.spec import EngineKind, WorkerSpec, WorkerTimeouts

BUSY_S = 900.0
ON_CPU = WorkerTimeouts(busy_stall_s=BUSY_S)


async def compute(watching: Watching, seconds: float, cores: float) -> None:
    """Let the engine's processes use CPU for a while, and show no other sign."""
    for _ in range(int(seconds)):
        watching.engine.cpu_s += cores
        await pass_time(1)


def speak(running: InFlightRequest) -> None:
    running.answer.generation.touch()
    running.answer.generation.receive(TextDelta("word "))


@pytest.mark.parametrize("cores", [0.3, 1.0, 16.0])
def test_a_batch_many_times_longer_than_the_limit_is_left_alone(cores: float) -> None:
    """There are no tokens, no progress, no counters and no events, at full CPU, and then the engine goes on.

    Source: specification, "CPU evidence".
    """

    async def scenario() -> None:
        watching = Watching(ON_CPU)
        running = watching.fly()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watching.watch.run)
            await compute(watching, 3 * 120 + BUSY_S / 2, cores)
            speak(running)
            await pass_time(30)
            tasks.cancel_scope.cancel()
        assert watching.engine.broken == []
        assert running.ending is None

    virtually(scenario)


def test_a_request_beside_a_long_batch_waits_with_it() -> None:
    """Specification, "CPU evidence": its 60 s run out while another's batch is read, and neither is charged."""

    async def scenario() -> None:
        watching = Watching(ON_CPU)
        talker = watching.fly()
        speak(talker)
        reader = watching.fly()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watching.watch.run)
            await compute(watching, 400, 1.0)
            tasks.cancel_scope.cancel()
        assert watching.engine.broken == []
        assert (talker.ending, reader.ending) == (None, None)

    virtually(scenario)


def test_a_slot_that_still_reads_for_a_cancelled_request_is_left_alone() -> None:
    """Specification, "Leaked slots": the batch of a cancelled request is computed to its end."""

    async def scenario() -> None:
        watching = Watching(WorkerTimeouts(cancel_s=30, busy_stall_s=BUSY_S))
        watching.engine.counters = EngineCounters(work=(SlotWork(task=1, prompt_tokens=5, output_tokens=0),))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watching.watch.run)
            running = watching.fly()
            await compute(watching, 5, 1.0)
            watching.land(running)
            await compute(watching, 300, 1.0)
            assert watching.engine.broken == []
            await compute(watching, BUSY_S, 1.0)  # and not for ever
            tasks.cancel_scope.cancel()
        assert len(watching.engine.broken) == 1

    virtually(scenario)


@pytest.mark.parametrize(
    ("timeouts", "cores", "has_token", "at_s"),
    [
        (ON_CPU, 1.0, False, 120 + BUSY_S),  # it spins
        (ON_CPU, 0.0, False, 120),  # it sleeps
        (ON_CPU, 0.05, False, 120),  # its server's threads turn over
        (ON_CPU, 1.0, True, 60),  # no prompt is being read: no batch is long in a decode
        (WorkerTimeouts(busy_stall_s=0), 16.0, False, 120),  # on a GPU an engine that hangs spins
    ],
    ids=["spins", "sleeps", "idles", "spins while it decodes", "spins on a GPU"],
)
def test_a_hang_is_found_within_its_bound(timeouts: WorkerTimeouts, cores: float, has_token: bool, at_s: float) -> None:
    """CPU time counts for an engine while a batch may be running, and only for a bounded time."""

    async def scenario() -> None:
        watching = Watching(timeouts)
        running = watching.fly()
        if has_token:
            speak(running)
        started = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watching.watch.run)
            with anyio.fail_after(10 * MINUTE + 2 * BUSY_S):
                while not watching.engine.broken:
                    await compute(watching, 1, cores)
            tasks.cancel_scope.cancel()
        ((at, _, suspects),) = watching.engine.broken
        assert at_s <= at - started <= at_s + 20
        assert list(suspects) == [running]

    virtually(scenario)


def test_the_batch_time_is_learned_from_the_first_batch_of_any_prompt() -> None:
    """A prompt whose first batch took 100 s gets 100 s for each remaining batch, though no prompt was ever answered."""

    async def scenario() -> None:
        watching = Watching(WorkerTimeouts(busy_stall_s=0))
        running = watching.fly()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watching.watch.run)
            await pass_time(100)
            running.answer.generation.touch()
            running.answer.generation.receive(PromptProgress(8192, 0, 2048, 100_000.0))
            await pass_time(1)
            assert watching.watch.observations.pace.tokens_per_s == pytest.approx(20.48)
            assert watching.watch.judge(running).limit_s == pytest.approx(120 + 300)
            await pass_time(290)
            tasks.cancel_scope.cancel()
        assert watching.engine.broken == []
        assert running.ending is None

    virtually(scenario)


def test_the_speed_of_an_unknown_engine_is_measured_once() -> None:
    """The first prompt then gets the time that it needs, however long its batches take."""

    async def scenario() -> None:
        watching = Watching(WorkerTimeouts(busy_stall_s=0))
        watching.engine.calibration = Calibration(tokens=200, seconds=10.0)
        spec = WorkerSpec(engine=EngineKind.EMBEDDED, on_cpu=True)
        calibration = EngineCalibration(spec, watching.engine, watching.watch.observations)
        await calibration.run()
        watching.engine.calibration = Calibration(tokens=200, seconds=1.0)
        await calibration.run()
        assert watching.watch.observations.pace.tokens_per_s == 20.0
        assert watching.watch.judge(watching.fly(8000)).limit_s == 120 + 200

    virtually(scenario)


def test_cached_tokens_do_not_count_towards_the_speed() -> None:
    """Only computed tokens count, since the last sign of progress."""
    watching_pace: list[float | None] = []

    async def scenario() -> None:
        watching = Watching()
        running = watching.fly()
        observations: Observations = watching.watch.observations
        for told in (PromptProgress(9000, 4000, 4000, 1.0), PromptProgress(9000, 4000, 6000, 10_001.0)):
            running.answer.generation.touch()
            running.answer.generation.receive(told)
            observations.learn_batches(running)
            observations.learn_batches(running)
            watching_pace.append(observations.pace.tokens_per_s)

    virtually(scenario)
    assert watching_pace == [None, pytest.approx(2000 / 10.001)]


def test_cpu_is_measured_over_a_meaningful_interval() -> None:
    """A short look once read 492 % on two cores. A new process adds its own time only."""
    seen: list[float | None] = []

    async def scenario() -> None:
        watching = Watching()
        running = watching.fly()
        observations = watching.watch.observations
        for after_s, cpu_s, newcomer_s in (
            (0.0, 100.0, 0.0),
            (0.01, 100.05, 0.0),
            (1.99, 102.0, 1.0),
            (2.0, 103.0, 0.0),
        ):
            await pass_time(after_s)
            watching.engine.cpu_s, watching.engine.compiler_s = cpu_s, newcomer_s
            await observations.poll_kernel()
            seen.append(observations.evidence(running).cpu_percent)

    virtually(scenario)
    assert seen == [None, None, 150.0, 50.0]


def spec(engine: EngineKind = EngineKind.EMBEDDED, **fields: object) -> WorkerSpec:
    return WorkerSpec(engine=engine, model="/m", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "environment", "is_gpu_there", "expected"),
    [
        (spec(), {}, False, True),
        (spec(), {}, True, False),
        (spec(args={"n_gpu_layers": 0}), {}, True, True),
        (spec(args={"-ngl": 99}), {}, True, False),
        (spec(), {"CUDA_VISIBLE_DEVICES": ""}, True, True),
        (spec(env={"CUDA_VISIBLE_DEVICES": "0"}), {"CUDA_VISIBLE_DEVICES": ""}, True, False),
        (spec(EngineKind.VLLM, args={"device": "cpu"}), {}, True, True),
    ],
)
def test_where_an_engine_computes(
    given: WorkerSpec, environment: dict[str, str], is_gpu_there: bool, expected: bool
) -> None:
    """An engine that hangs on a GPU spins, so its CPU time proves nothing there."""
    assert computes_on_cpu(given, environment, is_gpu_there=is_gpu_there) is expected


def test_the_wheel_says_whether_it_uses_a_device() -> None:
    """The tests' wheel computes on the CPU, whatever the machine has."""
    assert not embedded_has_gpu()


def test_the_device_decides_the_default(tmp_path: Path) -> None:
    """A number that the author gives is kept, and so is the author's word on where the engine computes."""
    at: Callable[[WorkerSpec], float | None] = lambda given: placed(given, {}).timeouts.busy_stall_s  # noqa: E731
    assert at(spec(on_cpu=True)) == BUSY_STALL_S
    assert at(spec(on_cpu=False)) == 0
    assert at(spec(on_cpu=False, timeouts=WorkerTimeouts(busy_stall_s=7))) == 7
    assert not has_gpu(tmp_path)
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert has_gpu(tmp_path)
