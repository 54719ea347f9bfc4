"""An engine's speed, the time an answer takes at that speed, and what an engine is asked before its first request."""

import dataclasses
import time

import pytest
from msgspec.structs import replace

from tests.harness.virtual import virtually
from tests.harness.watching import FakeEngine, Watching
from transport.events import Finished, TextDelta, Usage
from workers.devices.layout import LayoutPolicy, lanes_of
from workers.health.calibration import EngineCalibration
from workers.health.evidence import Observations
from workers.health.latency_record import LatencyRecord
from workers.health.probes import Calibration
from workers.policy.pace import AnswerWork, EnginePace, Spread, latency_ms
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer
from workers.requests.in_flight import InFlightRequests
from workers.spec import EngineKind, WorkerSpec
from workers.tools.calls import ToolRecord

LANE = lanes_of([], LayoutPolicy(), 8192)[0]
ON_LANE = WorkerSpec(engine=EngineKind.VLLM, model="m", lane=LANE, max_tokens_per_step=32, warm_up="You are in Rome.")
ON_LANE = dataclasses.replace(ON_LANE, warm_up_tools=({"name": "vote"},))
PACE = EnginePace().read(tokens=1000, seconds=2.0).wrote(tokens=100, seconds=1.0)


def test_an_answers_time_is_its_prompt_its_steps_its_tools_and_its_swap() -> None:
    """Specification, "Latency model": steps are whole ones."""
    assert latency_ms(PACE, AnswerWork(fresh_tokens=500, output_tokens=33), quantum=16) == pytest.approx(1000 + 3 * 160)
    work = AnswerWork(fresh_tokens=0, output_tokens=32, tools_s=0.5, swap_s=2.0)
    assert latency_ms(PACE, work, quantum=16) == pytest.approx(2 * 160 + 2500)
    assert latency_ms(EnginePace().read(tokens=1000, seconds=2.0), work) is None
    assert latency_ms(EnginePace().wrote(tokens=100, seconds=1.0), work) is None


def test_the_newest_measurements_count_with_their_spread() -> None:
    """An outlier changes little; a measurement that is too short is ignored."""
    pace = EnginePace()
    for seconds in (9.0, 1.0, 1.0, 2.0, 1.0, 4.0):
        pace = pace.read(tokens=1000, seconds=seconds)
    assert pace.prefill_ms == Spread(middle=1.0, least=1.0, most=4.0)
    assert pace.read(tokens=63, seconds=99.0) == pace.wrote(tokens=7, seconds=99.0) == pace
    assert pace.kernel_ms() is None
    wrote = pace.wrote(tokens=16, seconds=1.0).wrote(tokens=16, seconds=2.0)
    assert wrote.kernel_ms(16) == Spread(middle=1500.0, least=1000.0, most=2000.0)


def test_each_start_on_a_lane_is_measured_twice_and_warmed() -> None:
    """The first measurement may be of a cold cache; the speed is known before the first request."""

    async def scenario() -> None:
        watching = Watching()
        calibration = EngineCalibration(ON_LANE, watching.engine, watching.watch.observations)
        for number, tokens in enumerate((200, 400), start=1):
            watching.engine.calibration = Calibration(tokens=tokens, seconds=1.0, answer_tokens=15, answer_s=0.3)
            await calibration.run()
            assert watching.engine.read == [(ON_LANE.warm_up, {"name": "vote"})] * number
            assert watching.engine.calibrated_with == [(200, 32), (200, 32)] * number
        pace = watching.watch.observations.pace
        assert (pace.rates, pace.steps_s) == ((200, 200, 400, 400), (0.02,) * 4)
        assert watching.watch.judge(watching.fly(prompt_chars=1200)).limit_s == 120 + 2

    virtually(scenario)


def test_an_engine_that_reports_nothing_is_served_all_the_same() -> None:
    """No time is predicted for it, and without settings nothing is warmed."""

    async def scenario() -> None:
        watching = Watching()
        spec = dataclasses.replace(ON_LANE, warm_up="", context=512, max_tokens_per_step=1)
        await EngineCalibration(spec, watching.engine, watching.watch.observations).run()
        assert watching.engine.calibrated_with == [(62, 16)]  # it fits, and shows the rate
        assert watching.watch.observations.pace == EnginePace()
        assert watching.engine.read == []

    virtually(scenario)


def _answered(tools: tuple[ToolRecord, ...] = ()) -> Answer:
    answer = Answer(time.monotonic)
    generation = answer.begin_generation(RepetitionLimits(), 100)
    for event in (TextDelta("words"), Usage(600, 32, 100), Finished("stop")):
        generation.receive(event)
    answer.tool_calls += tools
    return answer


def test_a_prediction_stands_beside_its_measurement() -> None:
    """It counts the tokens that were not cached; calls of one message run in parallel, so the longest one counts."""
    observations = Observations(InFlightRequests(), FakeEngine(), time.monotonic)
    record = LatencyRecord(observations, quantum=16)
    unknown = _answered()
    record.note_answer(unknown, 1.0)
    assert (unknown.predicted_ms, record.error) == (None, None)
    observations.pace = PACE
    call = ToolRecord(iteration=0, id="a", name="look", arguments={}, duration_s=0.5)
    told = _answered((call, replace(call, duration_s=0.2), replace(call, iteration=1, duration_s=0.3)))
    record.note_answer(told, 1.0)
    assert told.predicted_ms == pytest.approx(1000 + 2 * 160 + 800)
    assert record.error == pytest.approx(1.12)
    record.note_answer(_answered(), 1.32)
    record.note_answer(_answered(), 1.32)
    assert record.error == pytest.approx(0.0)
