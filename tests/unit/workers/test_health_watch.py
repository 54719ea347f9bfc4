"""The real watch under a virtual clock: which requests are ended, and when."""

import itertools
import math
from random import Random

import anyio
import pytest
from msgspec.structs import replace

from tests.harness.virtual import pass_time, virtually
from tests.harness.watching import MINUTE, Watching
from transport.counters import EngineCounters, SlotWork
from transport.events import Finished, PromptProgress, TextDelta
from workers.health.probes import ProbeResult
from workers.outcome import EngineFailed, FailureReason, RequestFailed
from workers.requests.answer import Phase
from workers.requests.in_flight import InFlightRequest
from workers.spec import WorkerTimeouts


class TestVirtualTime:
    @pytest.mark.parametrize("sign", ["progress", "counters", "tokens of another"])
    def test_half_an_hour_of_prefill_is_left_alone(self, sign: str) -> None:
        """An engine that shows any evidence is never killed, with the evidence just within the limit each time."""

        async def scenario() -> None:
            watching = Watching()
            running, other = watching.fly(), watching.fly()
            idle = SlotWork(task=1, prompt_tokens=0, output_tokens=0)
            watching.engine.counters = EngineCounters(work=(idle,))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                for step in range(int(30 * MINUTE / 110)):
                    await pass_time(110 if sign != "tokens of another" else 50)
                    watching.engine.cpu_s += 0  # it waits for its device: no tick at all
                    generation = running.answer.generation
                    if sign == "progress":
                        generation.touch()
                        generation.receive(PromptProgress(10_000, 0, step + 1, 1.0))
                    elif sign == "counters":
                        work = SlotWork(task=1, prompt_tokens=step + 1, output_tokens=0)
                        watching.engine.counters = EngineCounters(work=(work,))
                    else:
                        other.answer.generation.touch()
                        other.answer.generation.receive(TextDelta("word "))
                tasks.cancel_scope.cancel()
            assert watching.engine.broken == []
            if sign != "tokens of another":
                assert running.ending is None

        virtually(scenario)

    @pytest.mark.parametrize("noise", ["nothing", "comments", "cpu", "log"])
    @pytest.mark.parametrize("has_token", [False, True])
    def test_a_hang_is_found_within_ten_seconds_of_its_limit_and_never_before(
        self, noise: str, has_token: bool
    ) -> None:
        """Pings, CPU time and a chatty log are reported, and excuse no engine."""

        async def scenario() -> None:
            watching = Watching()
            running = watching.fly()
            watching.engine.counters = EngineCounters(work=(SlotWork(task=1, prompt_tokens=5, output_tokens=0),))
            if has_token:
                running.answer.generation.touch()
                running.answer.generation.receive(TextDelta("word "))
            started = anyio.current_time()
            limit_s = 60 if has_token else 120
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                with anyio.fail_after(1000):
                    while not watching.engine.broken:
                        await pass_time(0.5)
                        if noise == "comments":
                            running.answer.generation.touch()
                        watching.engine.cpu_s += 0.5 * (noise == "cpu")
                        watching.engine.printed += 100 * (noise == "log")
                tasks.cancel_scope.cancel()
            ((at, reason, suspects),) = watching.engine.broken
            assert limit_s <= at - started <= limit_s + 10
            assert reason is (FailureReason.STALLED_DECODE if has_token else FailureReason.STALLED_PREFILL)
            assert list(suspects) == [running]

        virtually(scenario)

    def test_compiling_kernels_is_not_a_stall(self) -> None:
        """A pause for a compiler is accepted as long as the compiler works; one that hangs is found."""

        async def scenario() -> None:
            watching = Watching()
            watching.fly()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                for _ in range(int(10 * MINUTE)):
                    watching.engine.compiler_s += 1
                    await pass_time(1)
                assert watching.engine.broken == []
                ended_at = anyio.current_time()
                with anyio.fail_after(1000):
                    while not watching.engine.broken:
                        await pass_time(0.5)
                tasks.cancel_scope.cancel()
            ((at, _, _),) = watching.engine.broken
            assert 100 <= at - ended_at <= 130

        virtually(scenario)

    def test_an_engine_whose_canary_is_answered_loses_the_request_and_survives(self) -> None:
        """The canary decides."""

        async def scenario() -> None:
            watching = Watching()
            watching.engine.sings = True
            running = watching.fly()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                await pass_time(130)
                tasks.cancel_scope.cancel()
            assert watching.engine.broken == []
            assert isinstance(running.ending, EngineFailed)
            assert (running.ending.reason, running.ending.brought_down) == (FailureReason.STALLED_PREFILL, False)

        virtually(scenario)

    def test_a_request_that_waits_for_tools_or_for_us_is_not_judged(self) -> None:
        """The engine has no work on it."""

        async def scenario() -> None:
            watching = Watching()
            in_flight = [watching.fly(), watching.fly()]
            in_flight[0].answer.phase, in_flight[1].answer.phase = Phase.TOOLS, Phase.US
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                await pass_time(3600)
                tasks.cancel_scope.cancel()
            assert watching.engine.broken == []
            assert [running.ending for running in in_flight] == [None, None]
            assert [watching.watch.judge(running).verdict for running in in_flight] == ["tool_wait", "prefilling"]

        virtually(scenario)

    def test_a_loop_is_ended_within_a_second(self) -> None:
        """It is detected beside the token path, and still soon."""

        async def scenario() -> None:
            watching = Watching()
            running = watching.fly()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                for _ in range(20):
                    running.answer.generation.receive(TextDelta("I see.\n"))
                await pass_time(1)
                tasks.cancel_scope.cancel()
            assert isinstance(running.ending, RequestFailed)
            assert running.ending.reason is FailureReason.REPEATED_LINE_LOOP

        virtually(scenario)

    @pytest.mark.parametrize(
        ("probe", "at_least_s", "at_most_s"),
        [(ProbeResult.ANSWERED, math.inf, math.inf), (ProbeResult.REFUSED, 30, 60), (ProbeResult.SILENT, 120, 150)],
    )
    def test_an_engine_without_work_is_probed(self, probe: ProbeResult, at_least_s: float, at_most_s: float) -> None:
        """Otherwise the next turn would find the failure. A slow answer gets the time of a prefill."""

        async def scenario() -> None:
            watching = Watching()
            watching.engine.probes = probe
            started = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                await pass_time(300)
                tasks.cancel_scope.cancel()
            if math.isinf(at_least_s):
                assert watching.engine.broken == []
            else:
                assert at_least_s <= watching.engine.broken[0][0] - started <= at_most_s

        virtually(scenario)

    @pytest.mark.parametrize(("freed_after_s", "is_broken"), [(20, False), (3600, True)])
    def test_a_slot_must_come_free_after_a_cancel(self, freed_after_s: float, is_broken: bool) -> None:
        """``cancel_s`` bounds the wait: a cancel takes effect between two batches of a large prompt."""

        async def scenario() -> None:
            watching = Watching(WorkerTimeouts(cancel_s=30))
            work = SlotWork(task=1, prompt_tokens=5, output_tokens=0)
            watching.engine.counters = EngineCounters(work=(work,))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                running = watching.fly()
                await pass_time(5)
                watching.land(running)
                await pass_time(freed_after_s if freed_after_s < 100 else 40)
                if freed_after_s < 100:
                    watching.engine.counters = EngineCounters(work=(replace(work, is_busy=False),))
                await pass_time(100)
                tasks.cancel_scope.cancel()
            assert bool(watching.engine.broken) is is_broken

        virtually(scenario)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("is_sick", [False, True])
    def test_a_busy_engine_is_not_mistaken_for_one_that_leaks_slots(self, seed: int, is_sick: bool) -> None:
        """Under full load one request in five is cut off, and its slot is freed a while later.

        Requests of all lengths run for half an hour. The sick engine keeps one slot in use, and is found while the
        others are as busy as ever.
        """

        async def scenario() -> None:
            chance = Random(seed)  # noqa: S311
            watching = Watching(WorkerTimeouts(cancel_s=30))
            busy: dict[int, SlotWork] = {}

            def tell() -> None:
                watching.engine.counters = EngineCounters(work=tuple(busy.values()))

            async def use_a_slot(slot: int) -> None:
                for number in itertools.count():
                    task = 1000 * number + slot
                    running = watching.fly()
                    await pass_time(chance.uniform(0, 0.1))  # a slot is taken a while before the first byte comes
                    busy[task] = SlotWork(task=task, prompt_tokens=5, output_tokens=0)
                    tell()
                    await speak(running, chance.choice([1.0, 5.0, 20.0, 200.0]))
                    if chance.random() < 0.8:
                        running.answer.generation.receive(Finished("stop"))
                        del busy[task]
                        watching.land(running)
                    else:
                        watching.land(running)
                        if is_sick and number > 5 and slot == 0:
                            return
                        await pass_time(chance.uniform(0, 25))
                        del busy[task]
                    tell()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watching.watch.run)
                for slot in range(8):
                    tasks.start_soon(use_a_slot, slot)
                await pass_time(30 * MINUTE)
                tasks.cancel_scope.cancel()
            assert bool(watching.engine.broken) is is_sick

        async def speak(running: InFlightRequest, seconds: float) -> None:
            for _ in range(math.ceil(seconds)):
                await pass_time(1)
                running.answer.generation.touch()
                running.answer.generation.receive(TextDelta(f"{anyio.current_time()} "))

        virtually(scenario)
