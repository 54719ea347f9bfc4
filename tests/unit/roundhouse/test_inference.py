"""The parts of the inference engine that need no engine: pins, endings, the queue, news, the log and its replay."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import anyio.lowlevel
import pytest
from msgspec.structs import replace

from roundhouse.inference.checkpoints import Allocator
from roundhouse.inference.event_log import EventLog, replay
from roundhouse.inference.failures import InferenceFailed, NoLane
from roundhouse.inference.lane_agents import LaneAgent, Served
from roundhouse.inference.lane_news import REMEMBERED, LaneNews
from roundhouse.inference.runs import AgentRuns, WaitingRun
from service.scheduling.core.deaths import MOST_DEATHS
from workers.devices.device import Gpu
from workers.devices.layout import Lane, LayoutPolicy, lanes_of
from workers.lanes.lane_pool import LanePool, LaneSet
from workers.lanes.lane_spec import memory_need
from workers.lanes.swap_log import Swap
from workers.outcome import EngineFailed, FailureReason
from workers.spec import EngineKind, WorkerSpec


def waiting_run() -> WaitingRun:
    return WaitingRun(1, LaneAgent("a", Served(model="m", lane="lane-0"), {}))


def lanes(gpus: int, each: int = 2) -> tuple[Lane, ...]:
    devices = [Gpu(index=n, uuid=f"GPU-{n}", name="H100", memory_mib=80_000) for n in range(gpus)]
    return lanes_of(devices, LayoutPolicy(max_agents_per_gpu=each), host_memory_mib=1000)


class TestAllocator:
    def test_pins_are_on_distinct_devices_until_all_are_used(self) -> None:
        """Then those with room, then all of them again."""
        allocator = Allocator(lanes(3))
        pins = [allocator.pin(f"m{n}", None) for n in range(8)]
        assert [pin.device.uuid for pin in pins] == [f"GPU-{n % 3}" for n in range(8)]
        assert sorted(pin.number for pin in pins[:6]) == list(range(6))

    def test_a_hint_comes_first_and_a_checkpoint_has_one_pin(self) -> None:
        """A second agent of a checkpoint changes no pin."""
        allocator = Allocator(lanes(2))
        assert allocator.pin("m", None, hint=3).number == 3
        assert allocator.pin("m", None, hint=0).number == 3

    def test_without_a_place_the_reason_is_given(self) -> None:
        """A hint that is no lane, and a checkpoint that fits no device."""
        allocator = Allocator(lanes(1))
        with pytest.raises(NoLane, match="lane_hint: 2 is no lane; there are 0 to 1"):
            allocator.pin("m", None, hint=2)
        with pytest.raises(NoLane, match="m takes 90000 MiB, and the largest device has room for 76000 MiB"):
            allocator.pin("m", 90_000)

    def test_a_checkpoint_that_is_too_large_is_refused_before_a_start(self, tmp_path: Path) -> None:
        """VLLM takes a lane's part in any case, and needs all of the weights."""
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(3 * 2**30)
        spec = WorkerSpec(engine=EngineKind.VLLM, model=str(tmp_path))
        need = memory_need(spec, {}, is_on_cpu=False)
        assert need is not None
        assert (need.least, need.taken) == (3072, None)
        small = lanes_of([], LayoutPolicy(), host_memory_mib=1000)
        with pytest.raises(NoLane, match="m takes 3072 MiB, and the largest device has room for 950 MiB"):
            Allocator(small).pin("m", need.least)


class TestRun:
    def test_deaths_count_except_those_from_outside(self) -> None:
        """A run that may be their cause is not tried for ever; one that was only present goes on."""
        run = waiting_run()
        died = EngineFailed(reason=FailureReason.ENGINE_DIED, detail="it exited", brought_down=True)
        killed = EngineFailed(reason=FailureReason.ENGINE_DIED, detail="", brought_down=True, is_outside=True)
        for _ in range(50):
            run.judge(killed, 1.0, 1.0)
        for _ in range(MOST_DEATHS - 1):
            run.judge(died, 1.0, 1.0)
        with pytest.raises(InferenceFailed, match="poisoned: it exited") as failed:
            run.judge(died, 1.0, 1.0)
        assert failed.value.reason == "poisoned"

    def test_refusals_are_tolerated_like_those_of_a_turn(self) -> None:
        """For their time, or for ever; but not ten times by engines that answer others."""
        refused = EngineFailed(reason=FailureReason.ENGINE_REJECTED, detail="500", brought_down=False)
        run, patient = waiting_run(), waiting_run()
        run.judge(refused, 1.0, 10.0)  # the first starts the clock
        run.judge(refused, 6.0, 10.0)
        with pytest.raises(InferenceFailed, match="engine_rejected: 500"):
            run.judge(refused, 6.0, 10.0)
        for _ in range(50):
            patient.judge(refused, 60.0, None)
        proved = replace(refused, is_proved=True)
        for _ in range(9):
            patient.judge(proved, 1.0, None)
        with pytest.raises(InferenceFailed, match="engine_rejected: 500"):
            patient.judge(proved, 1.0, None)


class TestQueue:
    async def test_a_cancelled_run_gets_no_slot(self) -> None:
        """Its task has not run yet: a shutdown or a free slot at that moment raises no error."""
        runs = AgentRuns(LanePool(LaneSet()), "fair", LaneNews({}), None, emulates=False)
        waiting = asyncio.create_task(runs.wait_seat(waiting_run()))
        await anyio.lowlevel.checkpoint()
        waiting.cancel()
        runs.start_runs()
        runs.close("over")
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def test_a_cancel_after_a_shutdown_is_a_cancel(self) -> None:
        """A run that learned of the end and is then cancelled has no slot to give back."""
        runs = AgentRuns(LanePool(LaneSet()), "fair", LaneNews({}), None, emulates=False)
        waiting = asyncio.create_task(runs.wait_seat(waiting_run()))
        await anyio.lowlevel.checkpoint()
        runs.close("over")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


class TestNews:
    async def test_a_slow_reader_loses_the_oldest_news_and_sees_the_end(self) -> None:
        """Each reader begins with news from after its start; unread news come before the end."""
        news = LaneNews({})
        behind = news.follow()
        first = asyncio.ensure_future(anext(behind))
        await anyio.lowlevel.checkpoint()
        now = datetime.now(UTC)
        for number in range(REMEMBERED + 2):
            news.report_swap(
                Swap(lane="lane-0", model=str(number), left=None, because="", seconds=1.0, number=1, at=now)
            )
        news.close()
        left = [await first, *[each async for each in behind]]
        assert [each["model"] for each in left] == [str(number) for number in range(3, REMEMBERED + 2)]


class TestEventLog:
    def test_all_events_are_on_the_disk_after_a_close_and_come_back_in_order(self, tmp_path: Path) -> None:
        """Over many rotations, with no file removed."""
        path = tmp_path / "logs" / "game_logger.jsonl"
        log = EventLog(path, max_bytes=1000)
        for number in range(500):
            log.write({"event": "EVENT_INFER_START", "time": float(number), "agent": "ä"})
        log.close()
        assert len(list(path.parent.iterdir())) > 20
        assert [event["time"] for event in replay(path)] == [float(number) for number in range(500)]

    def test_a_second_process_appends_and_a_truncated_line_is_skipped(self, tmp_path: Path) -> None:
        """Events are ordered by the clock, whichever process wrote them."""
        path = tmp_path / "log.jsonl"
        path.write_text('{"event": "EVENT_INFER_DONE", "time": 5.0}\n{"event": "EVENT_INF')
        log = EventLog(path)
        log.write({"event": "EVENT_INFER_START", "time": 2.0})
        log.write({"event": "EVENT_INFER_START", "time": 1.0})
        log.close()
        assert [event["time"] for event in replay(path)] == [1.0, 5.0]  # the line that was cut took one with it
