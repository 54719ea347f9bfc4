"""Verdicts without an engine: the pure judge, repetition, and the real watch under a virtual clock."""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.virtual import pass_time, virtually
from transport.counters import EngineCounters, SlotWork
from transport.events import Finished, PromptProgress, TextDelta
from workers.health.canary import CanaryResult
from workers.health.probes import Calibration, KernelView, ProbeResult, ProcessView
from workers.health.watch import HealthWatch
from workers.outcome import EngineFailed, FailureReason, RequestFailed
from workers.policy.liveness import (
    EngineObservations,
    Judgement,
    RequestObservations,
    Scope,
    StallLimits,
    Verdict,
    judge,
)
from workers.policy.pace import EnginePace
from workers.policy.repetition import Repetition, RepetitionLimits
from workers.requests.answer import Answer, Phase
from workers.requests.in_flight import InFlightRequest, InFlightRequests
from workers.spec import WorkerTimeouts

LIMITS = StallLimits(prefill_s=120, decode_s=60)
READING = RequestObservations(has_token=False, progress_at=1000.0)
WRITING = RequestObservations(has_token=True, progress_at=1000.0)
SERVING = EngineObservations(is_serving=True)


def look(request: RequestObservations, engine: EngineObservations, after_s: float) -> tuple[Verdict, Scope | None]:
    told = judge(LIMITS, request, engine, 1000.0 + after_s)
    return told.verdict, told.scope


class TestJudge:
    @pytest.mark.parametrize(
        ("request_signs", "after_s", "verdict"),
        [
            (READING, 1, Verdict.PREFILLING),
            (WRITING, 1, Verdict.DECODING),
            (READING, 5, Verdict.SILENT),
            (WRITING, 59.9, Verdict.SILENT),
            (READING, 119.9, Verdict.SILENT),
            (READING, 120, Verdict.STALLED),
            (WRITING, 60, Verdict.STALLED),
        ],
    )
    def test_each_phase_has_its_limit(
        self, request_signs: RequestObservations, after_s: float, verdict: Verdict
    ) -> None:
        """Specification, "Progress": progress, not the time to the first token."""
        assert look(request_signs, SERVING, after_s)[0] is verdict

    def test_a_server_that_answers_others_may_hold_a_request_back(self) -> None:
        """For as long as ticks speak elsewhere; once it has begun to answer, or answers nobody, its limit counts."""
        limits = StallLimits(prefill_s=120, decode_s=60, busy_s=900)
        waiting = RequestObservations(has_token=False, has_begun=False, progress_at=1000.0)

        def verdict(request: RequestObservations, after_s: float, answered_s: float | None) -> Verdict:
            at = None if answered_s is None else 1000.0 + answered_s
            engine = EngineObservations(is_serving=True, others_at=at, answering_at=at)
            return judge(limits, request, engine, 1000.0 + after_s).verdict

        assert verdict(waiting, 500, 499) is Verdict.SILENT
        assert verdict(waiting, 500, 381) is Verdict.SILENT  # from the end of another it has its whole limit
        assert verdict(waiting, 500, 380) is Verdict.STALLED
        assert verdict(waiting, 500, None) is Verdict.STALLED
        assert verdict(waiting, 1020, 1019) is Verdict.STALLED
        assert verdict(READING, 500, 499) is Verdict.STALLED

    def test_no_limit_is_for_ever(self) -> None:
        """Null switches a limit off."""
        none = StallLimits(prefill_s=None, decode_s=None)
        assert judge(none, READING, SERVING, 1e9).verdict is Verdict.SILENT

    def test_without_an_engine_it_is_dead(self) -> None:
        """Whatever else is known."""
        assert look(READING, EngineObservations(is_serving=False), 1)[0] is Verdict.DEAD

    def test_a_limit_of_prefill_grows_with_the_prompt(self) -> None:
        """At the measured rate: 100,000 tokens at 50 a second take 2,000 seconds more."""
        speed = EnginePace().learned(tokens=1000, seconds=20, chars=4000, prompt_tokens=1000)
        assert (speed.tokens_per_s, speed.tokens_a_char) == (50, 0.25)
        long = RequestObservations(has_token=False, progress_at=1000.0, prefill_left_s=speed.seconds_for(100_000))
        assert look(long, SERVING, 2119)[0] is Verdict.SILENT
        assert look(long, SERVING, 2120)[0] is Verdict.STALLED
        slower = speed.learned(tokens=1000, seconds=100, chars=4000, prompt_tokens=1000)
        assert slower.tokens_per_s == 30
        frozen = slower.learned(tokens=64, seconds=600, chars=400, prompt_tokens=64)
        assert frozen.tokens_per_s == 10
        assert speed.learned(tokens=3, seconds=9, chars=12, prompt_tokens=3) == speed
        assert EnginePace().seconds_for(1e6) == 0

    @given(st.floats(0, 1e6), st.floats(0, 119))
    def test_a_counter_that_rises_vetoes_every_kill(self, silent_s: float, ago: float) -> None:
        """Of whichever slot: nobody else explains it, so it may be ours."""
        now = 1000.0 + silent_s
        risen = EngineObservations(is_serving=True, rose_at=now - ago, unexplained_at=now - ago)
        assert judge(LIMITS, READING, risen, now).scope is None

    @given(st.floats(120, 1e6))
    def test_an_old_sign_vetoes_nothing(self, silent_s: float) -> None:
        """The limit counts from the last sign, whatever it was."""
        now = 1000.0 + silent_s
        risen = EngineObservations(is_serving=True, rose_at=now - 120, unexplained_at=now - 120, others_at=now - 120)
        assert judge(LIMITS, READING, risen, now).scope is Scope.ENGINE

    def test_a_request_may_stall_alone(self) -> None:
        """Others get on and explain every slot that does: this one ends, and its engine does not."""
        others = EngineObservations(is_serving=True, rose_at=1060.0, others_at=1060.0, unexplained_at=None)
        assert look(WRITING, others, 60) == (Verdict.STALLED, Scope.REQUEST)

    def test_a_prompt_may_wait_for_anothers(self) -> None:
        """llama-server reads one prompt after the other: no progress while another's is read is no stall."""
        reading = EngineObservations(is_serving=True, rose_at=1119.0, others_at=1119.0, prefilling_at=1119.0)
        assert look(READING, reading, 120) == (Verdict.SILENT, None)
        assert look(WRITING, reading, 120) == (Verdict.STALLED, Scope.REQUEST)


def repeats(*pieces: str, lines: int | None = 8) -> str | None:
    """Return what a detector says to these pieces and their end."""
    detector = Repetition(RepetitionLimits(lines=lines))
    for piece in pieces:
        found = detector.feed(piece)
        if found is not None:
            return found
    return detector.end_text()


class TestRepetition:
    def test_the_same_line_again_and_again_is_a_loop(self) -> None:
        """Specification, "Repetition"; the last line needs no line break, and pieces may cut anywhere."""
        assert repeats("I see.\n" * 7) is None
        assert "8 times" in (repeats("I see.\n" * 7 + "I see.") or "")
        assert repeats(*("I see.\n" * 8)) is not None
        assert repeats("  I see.\n\n" * 8) is not None
        assert repeats("I see.\n" * 7 + "No.\n" + "I see.\n" * 7) is None
        assert repeats("I see.\n" * 3, lines=3) is not None
        assert repeats("I see.\n" * 1000, lines=None) is None

    @pytest.mark.parametrize(
        "text",
        [
            "\n" * 500,
            "```\n" * 50,
            "|---|---|\n" * 50,
            "----\n" * 50,
            "```\n" + "    0, 0,\n" * 40 + "```\n",
            "".join(f"```python\nprint({number})\n```\n" for number in range(50)),
            "}\n" * 60,
            "no " * 60,
            "=" * 2000,
            "".join(f"| {number} | same |\n" for number in range(200)),
        ],
    )
    def test_lines_that_repeat_for_a_reason_are_none(self, text: str) -> None:
        """Code fences and what is in them, table rules, blank lines, braces, a short chant."""
        assert repeats(text) is None

    @pytest.mark.parametrize(
        "text",
        [
            "round and round " * 100,
            "ha" * 400,
            "first\nsecond\nthird, and again\n" * 40,
            "x" * 700,
            " " * 5000,
            "\n" * 5000,
            "```\n" + "mov ax, bx\n" * 70,
            "a whole paragraph of quite some length, in which nothing else is said than this one thing. " * 12,
        ],
        ids=["phrase", "syllable", "three lines", "letter", "blanks", "blank lines", "in a fence", "paragraph"],
    )
    def test_a_loop_without_line_breaks_is_found(self, text: str) -> None:
        """One phrase again and again, and loops of more lines than one."""
        assert repeats(*(text[start : start + 37] for start in range(0, len(text), 37))) is not None

    @given(st.lists(st.text(alphabet="abc de\n.", min_size=1, max_size=40), max_size=60, unique=True))
    def test_text_that_goes_on_is_no_loop(self, pieces: list[str]) -> None:
        """However it is cut, the detector says the same of a text whose every line is new."""
        text = "".join(f"{number} {piece}" for number, piece in enumerate(pieces))
        if len(set(text.split("\n"))) == len(text.split("\n")):
            assert repeats(*text, lines=8) == repeats(text, lines=8)


@dataclass
class FakeEngine:
    """Probes that know what they will say (``workers.health.probes.Probes``), and what the watch did to it."""

    counters: EngineCounters | None = None
    sings: bool = False
    calibration: Calibration | None = None
    probes: ProbeResult = ProbeResult.ANSWERED
    cpu_s: float = 0.0
    compiler_s: float = 0.0
    printed: int = 0
    calibrated_with: list[tuple[int, int]] = field(default_factory=list)
    read: list[tuple[object, ...]] = field(default_factory=list)
    is_serving: bool = True
    is_starting: bool = False
    owns_engine: bool = True
    broken: list[tuple[float, FailureReason, Mapping[InFlightRequest, FailureReason]]] = field(default_factory=list)

    async def read_counters(self) -> EngineCounters | None:
        await pass_time(0.01)
        return self.counters

    async def ask_canary(self, limit_s: float) -> CanaryResult:
        if not self.sings:
            await pass_time(limit_s)
        return CanaryResult.HEARD if self.sings else CanaryResult.SILENT

    async def calibrate(self, words: int, answer_tokens: int) -> Calibration | None:
        self.calibrated_with.append((words, answer_tokens))
        return self.calibration

    async def read_prompt(self, system: str, tools: Sequence[Mapping[str, object]]) -> None:
        self.read.append((system, *tools))

    async def probe(self) -> ProbeResult:
        return self.probes

    def kernel_view_nowait(self) -> KernelView:
        return KernelView()

    async def kernel_view(self) -> KernelView:
        one = ProcessView(pid=1, name="e", state="running", wchan=None, rss_bytes=1, cpu_s=self.cpu_s, threads=1)
        two = ProcessView(
            pid=2, name="ptxas", state="running", wchan=None, rss_bytes=1, cpu_s=self.compiler_s, threads=1
        )
        return KernelView(processes=(one, two) if self.compiler_s else (one,))

    def log_bytes(self) -> int:
        return self.printed

    def break_engine(
        self, reason: FailureReason, because: str, suspects: Mapping[InFlightRequest, FailureReason]
    ) -> None:
        assert because
        self.broken.append((anyio.current_time(), reason, suspects))
        self.is_serving = False


class Watching:
    """The real watch over a fake engine, on a clock that runs as fast as it can."""

    def __init__(self, timeouts: WorkerTimeouts | None = None) -> None:
        self.engine = FakeEngine()
        self.in_flight = InFlightRequests()
        self.flights: dict[InFlightRequest, ExitStack] = {}  # each is closed when its request lands
        self.watch = HealthWatch(
            self.in_flight, self.engine, timeouts or WorkerTimeouts(), self.engine, anyio.current_time
        )

    def fly(self, prompt_chars: int = 100) -> InFlightRequest:
        """Put a request in flight."""
        answer = Answer(anyio.current_time)
        answer.begin_generation(RepetitionLimits(), prompt_chars).begin_stream()
        running = InFlightRequest(self.in_flight.next_id(), "a job", answer)
        self.flights[running] = ExitStack()
        self.flights[running].enter_context(self.in_flight.admit(running))
        return running

    def land(self, running: InFlightRequest) -> None:
        """Take a request out of the air."""
        self.flights.pop(running).close()
        self.watch.note_end(running)


MINUTE = 60.0


class TestVirtualTime:
    @pytest.mark.parametrize("sign", ["progress", "counters", "tokens of another"])
    def test_half_an_hour_of_prefill_is_left_alone(self, sign: str) -> None:
        """0 kills of an engine that shows any evidence, with the evidence a little within the limit each time."""

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
        """Pings, CPU and a chatty log are told, and save nobody."""

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

    def test_kernels_being_made_are_no_stall(self) -> None:
        """A pause for a compiler is left alone for as long as that works, and a compiler that hangs is found."""

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

    def test_an_engine_that_sings_loses_the_request_and_not_its_life(self) -> None:
        """The canary is the last word."""

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
        """The engine owes nothing."""

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
        """Beside the token path, and soon all the same."""

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
        """The next turn should not be the one to find out; and a slow answer is given the time of a prefill."""

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
        """cancel_s is how long it may take: between two batches of a big prompt, and no longer."""

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
    def test_a_busy_engine_is_not_taken_for_one_that_keeps_slots(self, seed: int, is_sick: bool) -> None:
        """Half an hour of saturation, requests of all lengths, one in five cut off, each freed a while later.

        The sick engine keeps one slot on, and is found while the others are as busy as ever.
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


def test_a_judgement_says_how_long_it_has_been() -> None:
    """What a user is shown."""
    assert judge(LIMITS, WRITING, SERVING, 1010.0) == Judgement(verdict=Verdict.SILENT, silent_s=10.0, limit_s=60)
