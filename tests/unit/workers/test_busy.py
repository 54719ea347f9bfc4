"""An engine that computes on the CPU and is in one long batch: it answers nothing, and is healthy."""

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
    """Let the engine's tree spend CPU for a while, and show nothing else."""
    for _ in range(int(seconds)):
        watching.engine.cpu_s += cores
        await pass_time(1)


def speak(running: InFlightRequest) -> None:
    running.answer.generation.touch()
    running.answer.generation.receive(TextDelta("word "))


@pytest.mark.parametrize("cores", [0.3, 1.0, 16.0])
def test_a_batch_many_times_the_limit_is_left_alone(cores: float) -> None:
    """No token, no progress, no counter and no song, at full CPU; and then it goes on.

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


def test_a_neighbour_that_decodes_waits_with_it() -> None:
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


def test_a_slot_that_still_reads_for_a_request_that_is_gone_is_left_alone() -> None:
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
        (ON_CPU, 1.0, True, 60),  # nobody's prompt is being read: no batch is long in a decode
        (WorkerTimeouts(busy_stall_s=0), 16.0, False, 120),  # on a GPU an engine that hangs spins
    ],
    ids=["spins", "sleeps", "idles", "spins while it decodes", "spins on a GPU"],
)
def test_a_hang_is_found_within_its_bound(timeouts: WorkerTimeouts, cores: float, has_token: bool, at_s: float) -> None:
    """CPU ticks speak for an engine where a batch may be running, and for so long."""

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


def test_the_pace_is_learned_from_the_first_batch_of_any_prompt() -> None:
    """A prompt whose first batch took 100 s has 100 s for each that is left, though none was ever answered."""

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


def test_the_pace_of_an_engine_that_nothing_is_known_of_is_measured_once() -> None:
    """So that the first prompt has the time that it needs, however long its batches are."""

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


def test_cached_tokens_do_not_count_towards_the_pace() -> None:
    """Only what was computed, and since the last word of it."""
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


def test_cpu_is_measured_over_an_interval_that_tells() -> None:
    """492 % on two cores were read in one short look; and a process that came brings its own time alone."""
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
    """On a GPU an engine that hangs spins, so there its ticks say nothing."""
    assert computes_on_cpu(given, environment, is_gpu_there=is_gpu_there) is expected


def test_the_wheel_says_whether_it_has_a_device() -> None:
    """The one that the tests are run with computes on the CPU, whatever the machine shows."""
    assert not embedded_has_gpu()


def test_what_is_known_of_the_device_decides_the_default(tmp_path: Path) -> None:
    """Whoever gives a number has it, and whoever says where it computes is believed."""
    at: Callable[[WorkerSpec], float | None] = lambda given: placed(given, {}).timeouts.busy_stall_s  # noqa: E731
    assert at(spec(on_cpu=True)) == BUSY_STALL_S
    assert at(spec(on_cpu=False)) == 0
    assert at(spec(on_cpu=False, timeouts=WorkerTimeouts(busy_stall_s=7))) == 7
    assert not has_gpu(tmp_path)
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert has_gpu(tmp_path)
