"""The parts of the inference engine that need no engine: pins, patience, the log of events and its replay."""

import asyncio
from pathlib import Path

import anyio.lowlevel
import pytest

from roundhouse.inference.checkpoints import Allocator
from roundhouse.inference.event_log import EventLog, replay
from roundhouse.inference.failures import EngineClosed, NoLane
from roundhouse.inference.runs import MOST_DEATHS, Patience, Turnstile
from workers.devices.device import Gpu
from workers.devices.layout import Lane, LayoutPolicy, lanes_of
from workers.lanes.lane_pool import LanePool
from workers.lanes.lane_spec import memory_need
from workers.outcome import EngineFailed, FailureReason
from workers.spec import EngineKind, WorkerSpec


def lanes(gpus: int, each: int = 2) -> tuple[Lane, ...]:
    devices = [Gpu(index=n, uuid=f"GPU-{n}", name="H100", memory_mib=80_000) for n in range(gpus)]
    return lanes_of(devices, LayoutPolicy(max_agents_per_gpu=each), host_memory_mib=1000)


class TestAllocator:
    def test_devices_are_distinct_until_all_are_used(self) -> None:
        """Then those with room, then all of them again."""
        allocator = Allocator(lanes(3))
        pins = [allocator.pin(f"m{n}", None) for n in range(8)]
        assert [pin.device.uuid for pin in pins] == [f"GPU-{n % 3}" for n in range(8)]
        assert sorted(pin.number for pin in pins[:6]) == list(range(6))

    def test_a_hint_comes_first_and_a_checkpoint_has_one_pin(self) -> None:
        """A second agent of a checkpoint changes nothing."""
        allocator = Allocator(lanes(2))
        assert allocator.pin("m", None, hint=3).number == 3
        assert allocator.pin("m", None, hint=0).number == 3
        assert allocator.lane_of("m").number == 3

    def test_where_there_is_no_place_the_reason_is_told(self) -> None:
        """A hint that is no lane, and a checkpoint that no device has room for."""
        allocator = Allocator(lanes(1))
        with pytest.raises(NoLane, match="lane_hint: 2 is no lane; there are 0 to 1"):
            allocator.pin("m", None, hint=2)
        with pytest.raises(NoLane, match="m takes 90000 MiB, and the largest device has room for 76000 MiB"):
            allocator.pin("m", 90_000)

    def test_a_checkpoint_whose_files_are_too_large_is_known_before_a_start(self, tmp_path: Path) -> None:
        """VLLM takes a lane's part whatever it loads, and cannot do without the weights."""
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(3 * 2**30)
        spec = WorkerSpec(engine=EngineKind.VLLM, model=str(tmp_path))
        need = memory_need(spec, {}, is_on_cpu=False)
        assert need is not None
        assert (need.least, need.taken) == (3072, None)
        small = lanes_of([], LayoutPolicy(), host_memory_mib=1000)
        with pytest.raises(NoLane, match="m takes 3072 MiB, and the largest device has room for 950 MiB"):
            Allocator(small).pin("m", need.least)


class TestPatience:
    def test_deaths_are_counted_but_for_those_from_outside(self) -> None:
        """A run that may be their cause is not tried for ever; one that only saw them is."""
        patience = Patience()
        died = EngineFailed(reason=FailureReason.ENGINE_DIED, detail="", brought_down=True)
        killed = EngineFailed(reason=FailureReason.ENGINE_DIED, detail="", brought_down=True, is_outside=True)
        assert {patience.pause_s(killed, 0.0, 1.0) for _ in range(50)} == {0.0}
        assert [patience.pause_s(died, 0.0, 1.0) for _ in range(MOST_DEATHS)] == [0.0] * (MOST_DEATHS - 1) + [None]

    def test_refusals_are_borne_for_their_time(self) -> None:
        """With pauses that grow, or the engine's own word for when to come again."""
        patience = Patience()
        refused = EngineFailed(reason=FailureReason.ENGINE_REJECTED, detail="", brought_down=False)
        assert [patience.pause_s(refused, at, 10.0) for at in (0.0, 1.0, 9.0)] == [0.1, 0.2, 0.4]
        later = EngineFailed(reason=FailureReason.ENGINE_REJECTED, detail="", brought_down=False, retry_after_s=7.0)
        assert patience.pause_s(later, 9.5, 10.0) == 7.0
        assert patience.pause_s(refused, 10.0, 10.0) is None
        assert Patience().pause_s(refused, 1e9, None) == 0.1


class TestTurnstile:
    async def test_a_run_that_was_cancelled_is_given_nothing(self) -> None:
        """Its task has not run yet: neither a shutdown nor a free slot at that moment breaks over it."""
        turnstile = Turnstile(LanePool(), "fair")
        waiting = asyncio.create_task(turnstile.enter("m"))
        await anyio.lowlevel.checkpoint()
        waiting.cancel()
        turnstile.start_runs()
        turnstile.fail_all(lambda: EngineClosed("over"))
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def test_a_cancel_behind_a_shutdown_is_a_cancel(self) -> None:
        """A run that was told of the end and is cancelled then has no slot to give back."""
        turnstile = Turnstile(LanePool(), "fair")
        waiting = asyncio.create_task(turnstile.enter("m"))
        await anyio.lowlevel.checkpoint()
        turnstile.fail_all(lambda: EngineClosed("over"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


class TestEventLog:
    def test_all_is_on_the_disk_when_it_is_closed_and_comes_back_in_order(self, tmp_path: Path) -> None:
        """Over many rotations, of which none is thrown away."""
        path = tmp_path / "logs" / "game_logger.jsonl"
        log = EventLog(path, max_bytes=1000)
        for number in range(500):
            log.write({"event": "EVENT_INFER_START", "time": float(number), "agent": "ä"})
        log.close()
        assert len(list(path.parent.iterdir())) > 20
        assert [event["time"] for event in replay(path)] == [float(number) for number in range(500)]

    def test_a_second_life_appends_and_what_a_crash_cut_is_passed_over(self, tmp_path: Path) -> None:
        """The order is that of the clock, whoever wrote."""
        path = tmp_path / "log.jsonl"
        path.write_text('{"event": "EVENT_INFER_DONE", "time": 5.0}\n{"event": "EVENT_INF')
        log = EventLog(path)
        log.write({"event": "EVENT_INFER_START", "time": 2.0})
        log.write({"event": "EVENT_INFER_START", "time": 1.0})
        log.close()
        assert [event["time"] for event in replay(path)] == [1.0, 5.0]  # the line that was cut took one with it
