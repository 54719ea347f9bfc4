"""Engines that sleep leave memory of the host and of their device to others."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.harness.service import Document
from tests.harness.sleeping import BEGIN, END, SLEEP, WAKE, Lanes, Told, lanes
from tests.harness.waiting import LIMIT_S, wait_until
from workers.devices.device import DeviceMemory, Gpu
from workers.devices.device_health import DeviceHealth
from workers.lanes import sleep

HOST_MIB = sleep.HOST_RESERVE_MIB + 1  # free: the reserve, and the size of a checkpoint here


@pytest.mark.parametrize(
    ("flags", "lacks", "sleeps"),
    [
        ({"enable-sleep-mode": True}, "", True),
        ({"enable_sleep_mode": True}, "", True),
        ({"enable-sleep-mode": True}, "room", False),
        ({"enable-sleep-mode": True}, "socket", False),
        ({"enable-sleep-mode": True}, "files", False),
        ({"enable-sleep-mode": False}, "", False),
        ({}, "", False),
    ],
)
async def test_an_engine_sleeps_only_if_allowed_and_if_the_host_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: Document, lacks: str, *, sleeps: bool
) -> None:
    """Otherwise it is ended, and started when its next turn comes."""
    monkeypatch.setattr(sleep, "host_free_mib", lambda: HOST_MIB - (lacks == "room"))
    async with lanes(tmp_path, args=Told(tmp_path).args("any", **flags), listens=lacks != "socket") as told:
        if lacks == "files":
            for name in "ab":
                (tmp_path / f"weights-{name}" / "model.safetensors").unlink()
        assert [await told.say(model) for model in "aba"] == ["weights-a", "weights-b", "weights-a"]
        down, up = (SLEEP, WAKE) if sleeps else (END, BEGIN)
        assert told.swaps() == [("a", BEGIN), ("a", down), ("b", BEGIN), ("b", down), ("a", up)]


class Card:
    """A GPU's memory as its driver would report it: the memory of awake engines, and ``held`` beside it."""

    UUID = "GPU-0"
    WEIGHTS_MIB = 4

    def __init__(self, folder: Path) -> None:
        self.told = Told(folder)
        self.held_mib = 0
        self.looks = 0

    def memory(self) -> dict[str, DeviceMemory]:
        self.looks += 1
        awake = {model for model, asked in dict(self.told.swaps()).items() if asked in {BEGIN, WAKE}}
        used_mib = 10 + self.WEIGHTS_MIB * len(awake) + self.held_mib
        return {self.UUID: DeviceMemory(total_mib=16_000, used_mib=used_mib)}

    def faults(self) -> Sequence[tuple[str, int]]:
        return ()

    def close(self) -> None:
        return


@asynccontextmanager
async def on_card(tmp_path: Path) -> AsyncIterator[tuple[Lanes, Card]]:
    card = Card(tmp_path)
    gpu = Gpu(index=0, uuid=Card.UUID, name="T4", memory_mib=16_000)
    async with lanes(tmp_path, gpu=gpu, health=DeviceHealth(card)) as told:
        for name in told.workers:
            os.truncate(tmp_path / f"weights-{name}" / "model.safetensors", Card.WEIGHTS_MIB * sleep.MIB)
        yield told, card


async def test_no_engine_is_loaded_before_the_sleeping_ones_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may answer before its device has all of the memory back."""
    monkeypatch.setattr(sleep, "FREE_S", 3 * LIMIT_S)
    async with on_card(tmp_path) as (told, card):
        assert await told.say("a") == "weights-a"
        told.misbehave("a", "sleep", "hold")
        told.note("b")
        await told.wait_asked("a", SLEEP)
        card.held_mib = Card.WEIGHTS_MIB
        told.behave("a")
        seen = card.looks
        await wait_until(lambda: card.looks > seen + 2, "it has been looked at")
        assert told.swaps("b") == []
        card.held_mib = 0
        assert await told.say("b") == "weights-b"


async def test_the_wait_for_free_memory_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs may use the device as well: the next engine will show whether there is room."""
    monkeypatch.setattr(sleep, "FREE_S", 0.2)
    async with on_card(tmp_path) as (told, card):
        await told.want("a")
        told.misbehave("a", "sleep", "hold")
        told.note("b")
        await told.wait_asked("a", SLEEP)
        card.held_mib = 100
        told.behave("a")
        assert await told.say("b") == "weights-b"


async def test_quick_successive_swaps_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory used before a sleep is read then: the last look may be older than the engine."""
    monkeypatch.setattr(sleep, "FREE_S", 3 * LIMIT_S)
    async with on_card(tmp_path) as (told, _):
        assert [await told.say(model) for model in "abab"] == ["weights-a", "weights-b"] * 2
        assert [len(told.pids(model)) for model in "ab"] == [1, 1]
