"""Which devices are not used: what their memory and their Xids prove, and what they do not."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import anyio
import pytest

from tests.harness.virtual import pass_time, virtually
from workers.devices.device import BACK_S, CPU, DeviceMemory, MemoryFinding, is_devices_fault, judge_memory
from workers.devices.device_health import LOOK_S, POLL_S, DeviceHealth, Mark
from workers.devices.layout import Device
from workers.errors import DeviceSick

FREE, COMING_BACK, LOST = MemoryFinding
GPU = "GPU-0"
WHOLE = Device(uuid=GPU, name="Tesla T4", memory_mib=10_000, room_mib=9500)
SLICES = [replace(WHOLE, uuid=f"MIG-{number}", is_slice=True, parent=GPU) for number in range(2)]
OURS, ALSO_OURS, FOREIGN = 100, 101, 900
LOST_MARK = Mark(
    because="5900 MiB of an engine that has ended have not come back, and no process has them", is_memory=True
)


def used(mib: int, held: Mapping[int, int] | None = None) -> DeviceMemory:
    return DeviceMemory(total_mib=10_000, used_mib=mib, held=held)


@pytest.mark.parametrize(
    ("before", "now", "finding"),
    [
        (used(100), used(100), FREE),
        (used(100), used(6000), COMING_BACK),
        (used(9900, {FOREIGN: 9800}), used(9900, {FOREIGN: 9800}), FREE),
        (used(100), used(9900, {FOREIGN: 9800}), FREE),
        (used(1000, {FOREIGN: 900}), used(9900, {FOREIGN: 9800}), FREE),
        (used(100), used(9900, {FOREIGN: 3000}), COMING_BACK),
        (used(4000, {FOREIGN: 4000}), used(3000), COMING_BACK),
        (used(100, {FOREIGN: 5000}), used(400), FREE),
        (used(6000), used(100), FREE),
    ],
    ids=[
        "nothing-is-there",
        "it-stays-for-nobody",
        "another-program-was-there",
        "another-program-has-come",
        "another-program-has-grown",
        "more-than-another-program-has",
        "another-program-has-left",
        "processes-say-more-than-the-device",
        "less-than-before",
    ],
)
def test_only_memory_without_a_process_is_evidence(
    before: DeviceMemory, now: DeviceMemory, finding: MemoryFinding
) -> None:
    """Other programs may use a device, come and go; the rest may be enough for ours."""
    assert judge_memory(before, now, alone=True, waited_s=0.0) is finding


@pytest.mark.parametrize(("alone", "finding"), [(True, COMING_BACK), (False, FREE)])
def test_without_visible_processes_a_device_with_our_engine_proves_nothing(
    finding: MemoryFinding, *, alone: bool
) -> None:
    """All of its used memory may be that engine's."""
    assert judge_memory(used(100), used(6000), alone=alone, waited_s=0.0) is finding
    assert judge_memory(used(5000, {OURS: 4900}), used(6000), alone=alone, waited_s=0.0) is finding


def test_memory_is_missing_beside_a_visible_engine() -> None:
    """That engine's memory is known, and memory beyond it belongs to no process."""
    before, now = used(5000, {FOREIGN: 4900}), used(9000, {FOREIGN: 4900, OURS: 2000})
    assert judge_memory(before, now, alone=False, waited_s=0.0) is COMING_BACK
    now = used(9000, {FOREIGN: 4900, OURS: 4000})
    assert judge_memory(before, now, alone=False, waited_s=0.0) is FREE


def test_a_twentieth_of_a_device_may_be_missing() -> None:
    """Contexts and drivers hold that much, for any time."""
    for waited_s in (0.0, 10 * BACK_S):
        assert judge_memory(used(100), used(600), alone=True, waited_s=waited_s) is FREE
    assert judge_memory(used(100), used(601), alone=True, waited_s=0.0) is COMING_BACK


def test_memory_has_half_a_minute_to_come_back() -> None:
    """Drivers take seconds to clean up after a killed process."""
    assert BACK_S == 30
    assert judge_memory(used(100), used(6000), alone=True, waited_s=29.99) is COMING_BACK
    assert judge_memory(used(100), used(6000), alone=True, waited_s=30.0) is LOST


@pytest.mark.parametrize(("before", "now"), [(None, used(9000)), (used(100), None), (None, None)])
def test_a_device_without_figures_is_used(before: DeviceMemory | None, now: DeviceMemory | None) -> None:
    """A missing driver or first look is no evidence."""
    assert judge_memory(before, now, alone=True, waited_s=99.0) is FREE


@pytest.mark.parametrize("xid", [48, 62, 64, 74, 79, 94, 95, 119, 120, 140])
def test_faults_of_a_device(xid: int) -> None:
    """The card fell off its bus, has uncorrectable memory errors, or its firmware hangs."""
    assert is_devices_fault(xid)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 69, 137])
def test_faults_of_programs_are_not_the_devices(xid: int) -> None:
    """A wrong address, a failed kernel and a killed process occur with our own engines."""
    assert not is_devices_fault(xid)


class Reader:
    """Reads one device: each look gives the next reading, and the last one repeats; None means no reading."""

    def __init__(self, *looks: DeviceMemory | None, uuid: str) -> None:
        self._uuid = uuid
        self.coming = list(looks)
        self.xids: list[int] = []
        self.looks = 0
        self.during: dict[int, Callable[[], object]] = {}  # what happens in the event loop at the n-th look
        self.is_closed = False

    def memory(self) -> Mapping[str, DeviceMemory]:
        self.looks += 1
        if self.looks in self.during:
            anyio.from_thread.run_sync(self.during[self.looks])
        shown = self.coming.pop(0) if len(self.coming) > 1 else self.coming[0]
        return {} if shown is None else {self._uuid: shown}

    def faults(self) -> Iterable[tuple[str, int]]:
        told, self.xids = self.xids, []
        return [(self._uuid, xid) for xid in told]

    def close(self) -> None:
        self.is_closed = True


class Watched:
    """A device's health, and the number of marks that were set and removed."""

    def __init__(self, *looks: DeviceMemory | None, device: Device = WHOLE) -> None:
        self.reader = Reader(*looks, uuid=device.uuid)
        self.changes = 0
        self.health = DeviceHealth(self.reader, self._changed)
        self._device = device

    def _changed(self) -> None:
        self.changes += 1

    async def run_engine(self) -> None:
        """Start and end an engine."""
        await self.health.wait_free(self._device)
        with self.health.engine_on(self._device.uuid):
            pass

    async def lose_memory(self) -> None:
        """Start and end an engine whose memory stays in use."""
        await self.run_engine()
        with pytest.raises(DeviceSick):
            await self.health.wait_free(self._device)
        assert self.health.marks == {self._device.uuid: LOST_MARK}


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.devices.device_health.time", SimpleNamespace(monotonic=anyio.current_time))


def test_a_start_waits_while_memory_comes_back() -> None:
    """It waits no longer than that, and no device is marked."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000), used(6000), used(3000), used(400))
        await device.run_engine()
        began_at = anyio.current_time()
        await device.health.wait_free(WHOLE)
        assert anyio.current_time() - began_at == pytest.approx(3 * POLL_S)
        assert (device.reader.looks, device.health.marks, device.changes) == (5, {}, 0)

    virtually(scenario)


def test_a_first_start_does_not_wait() -> None:
    """Memory that other programs used before us is theirs."""

    async def scenario() -> None:
        device = Watched(used(9900))
        await device.run_engine()
        await device.health.wait_free(WHOLE)
        assert device.reader.looks == 2

    virtually(scenario)


def test_a_device_whose_memory_does_not_come_back_is_not_used() -> None:
    """The refused start says how much is missing; the next one is refused without a wait."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000))
        await device.run_engine()
        began_at = anyio.current_time()
        told = f"device {GPU} is left alone: {LOST_MARK.because}"
        with pytest.raises(DeviceSick) as caught:
            await device.health.wait_free(WHOLE)
        assert str(caught.value) == told
        assert anyio.current_time() - began_at == pytest.approx(BACK_S)
        assert (device.health.marks, device.changes) == ({GPU: LOST_MARK}, 1)
        looks = device.reader.looks
        with pytest.raises(DeviceSick) as caught:
            await device.health.wait_free(WHOLE)
        assert (str(caught.value), device.reader.looks, device.changes) == (told, looks, 1)

    virtually(scenario)


def test_a_device_is_used_again_when_its_memory_is_back() -> None:
    """No operator is needed; a part of the memory is not enough."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000))
        await device.lose_memory()
        device.reader.coming = [used(700), used(600)]
        await device.health.refresh()
        assert (device.health.marks, device.changes) == ({GPU: LOST_MARK}, 1)
        await device.health.refresh()
        assert (device.health.marks, device.changes) == ({}, 2)
        await device.health.wait_free(WHOLE)

    virtually(scenario)


def test_a_device_that_cannot_be_read_stays_marked() -> None:
    """A driver that reports no memory does not remove the mark."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000))
        await device.lose_memory()
        device.reader.coming = [None]
        await device.health.refresh()
        assert (device.health.marks, device.changes) == ({GPU: LOST_MARK}, 1)

    virtually(scenario)


def test_an_xid_of_a_device_marks_it_until_an_operator_resumes_it() -> None:
    """Its memory looks fine, so no look removes the mark."""

    async def scenario() -> None:
        device = Watched(used(100))
        device.reader.xids = [79]
        await device.health.refresh()
        mark = Mark(because="the kernel has logged Xid 79 of it", is_memory=False)
        await device.health.refresh()
        assert (device.health.marks, device.changes) == ({GPU: mark}, 1)
        with pytest.raises(DeviceSick) as caught:
            await device.health.wait_free(WHOLE)
        assert str(caught.value) == f"device {GPU} is left alone: the kernel has logged Xid 79 of it"
        device.health.forgive(WHOLE)
        assert (device.health.marks, device.changes) == ({}, 2)
        await device.health.wait_free(WHOLE)

    virtually(scenario)


@pytest.mark.parametrize("xid", [31, 43, 45])
def test_an_xid_of_a_program_marks_nothing(xid: int) -> None:
    """A killed engine leaves one, and starts again."""

    async def scenario() -> None:
        device = Watched(used(100))
        device.reader.xids = [xid]
        await device.health.wait_free(WHOLE)
        assert (device.health.marks, device.changes) == ({}, 0)

    virtually(scenario)


def test_the_first_xid_is_the_one_reported() -> None:
    """Others follow from it; the log has them all."""

    async def scenario() -> None:
        device = Watched(used(100))
        device.reader.xids = [31, 48, 79]
        await device.health.refresh()
        assert (device.health.marks[GPU].because, device.changes) == ("the kernel has logged Xid 48 of it", 1)

    virtually(scenario)


def test_an_xid_outlasts_memory_that_comes_back() -> None:
    """A device that was marked for its memory and then fails needs an operator before it is used again."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000))
        await device.lose_memory()
        device.reader.xids = [79]
        await device.health.refresh()
        device.reader.coming = [used(100)]
        await device.health.refresh()
        assert device.health.marks == {GPU: Mark(because="the kernel has logged Xid 79 of it", is_memory=False)}

    virtually(scenario)


def test_an_operator_removes_a_memory_mark_too() -> None:
    """The missing memory is then accepted: engines get the rest."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000))
        await device.lose_memory()
        device.health.forgive(WHOLE)
        await device.run_engine()
        await device.health.wait_free(WHOLE)
        device.health.forgive(WHOLE)
        assert (device.health.marks, device.changes) == ({}, 2)  # there was none to take off the second time

    virtually(scenario)


def test_the_slices_of_a_gpu_fail_with_it() -> None:
    """Its Xids name the GPU; an operator who resumes a lane on one slice resumes all of them."""

    async def scenario() -> None:
        device = Watched(used(100))
        device.reader.xids = [79]
        mark = Mark(because="the kernel has logged Xid 79 of it", is_memory=False)
        for each in SLICES:
            with pytest.raises(DeviceSick) as caught:
                await device.health.wait_free(each)
            assert str(caught.value) == f"device {each.uuid} is left alone: {mark.because}"
        assert [device.health.mark_of(each) for each in (WHOLE, *SLICES)] == [mark] * 3
        device.health.forgive(SLICES[0])
        assert [device.health.mark_of(each) for each in (WHOLE, *SLICES)] == [None] * 3
        assert device.changes == 2

    virtually(scenario)


def test_a_slice_that_fails_is_marked_alone() -> None:
    """Its memory is its own; neither its GPU nor a neighbour is affected."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000), device=SLICES[0])
        await device.lose_memory()
        assert [device.health.mark_of(each) for each in (WHOLE, *SLICES)] == [None, LOST_MARK, None]
        device.health.forgive(SLICES[1])
        assert [device.health.mark_of(each) for each in SLICES] == [LOST_MARK, None]
        device.health.forgive(SLICES[0])
        assert device.health.mark_of(SLICES[0]) is None

    virtually(scenario)


def test_an_xid_ends_the_wait_for_memory() -> None:
    """The start is refused at once."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000))
        await device.run_engine()
        device.reader.during[3] = lambda: device.reader.xids.append(79)
        with pytest.raises(DeviceSick, match="Xid 79"):
            await device.health.wait_free(WHOLE)
        assert device.reader.looks == 3

    virtually(scenario)


def test_an_operator_ends_the_wait_for_memory() -> None:
    """The engine starts then."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000))
        await device.run_engine()
        device.reader.during[3] = lambda: device.health.forgive(WHOLE)
        await device.health.wait_free(WHOLE)
        assert (device.reader.looks, device.health.marks) == (3, {})

    virtually(scenario)


def test_memory_from_before_the_first_of_several_engines_counts() -> None:
    """A second engine beside it changes nothing; the memory of both has to come back."""

    async def scenario() -> None:
        device = Watched(used(100), used(4000), used(4000), used(300))
        await device.health.wait_free(WHOLE)
        with device.health.engine_on(GPU):
            await device.run_engine()  # where no process can be seen, it waits for nothing beside the first
            assert device.reader.looks == 2
        await device.health.wait_free(WHOLE)
        assert device.reader.looks == 4

    virtually(scenario)


def test_memory_is_missing_beside_a_visible_neighbour() -> None:
    """The engine of another lane goes on, and keeps its memory."""

    async def scenario() -> None:
        seen = {FOREIGN: 1000}
        device = Watched(used(1000, seen), used(4000, {**seen, OURS: 3000}), used(9000, {**seen, OURS: 3000}))
        await device.health.wait_free(WHOLE)
        with device.health.engine_on(GPU):
            await device.run_engine()
            with pytest.raises(DeviceSick, match="5000 MiB of an engine"):
                await device.health.wait_free(WHOLE)

    virtually(scenario)


def test_an_engine_that_fails_to_start_does_not_count_as_running() -> None:
    """Memory that it leaves in use counts as missing, like any other's."""

    async def scenario() -> None:
        device = Watched(used(100), used(6000), used(200))
        await device.health.wait_free(WHOLE)
        with pytest.raises(RuntimeError), device.health.engine_on(GPU):
            raise RuntimeError
        await device.health.wait_free(WHOLE)
        assert device.reader.looks == 3

    virtually(scenario)


def test_the_memory_of_the_cpu_is_never_missing() -> None:
    """All programs of the machine share it."""

    async def scenario() -> None:
        cpu = replace(WHOLE, uuid=CPU)
        device = Watched(used(100), used(9999), device=cpu)
        await device.run_engine()
        await device.health.wait_free(cpu)
        assert (device.reader.looks, device.health.marks) == (2, {})
        assert device.health.memory == {CPU: used(9999)}

    virtually(scenario)


def test_devices_are_read_periodically() -> None:
    """Until the task is cancelled; then the driver is released."""

    async def scenario() -> None:
        device = Watched(used(100), used(200), used(300))
        began_at = anyio.current_time()
        with anyio.CancelScope() as running:
            device.reader.during[3] = running.cancel
            await device.health.run()
        assert anyio.current_time() - began_at == pytest.approx(2 * LOOK_S)
        assert (device.reader.looks, device.reader.is_closed) == (3, True)
        await pass_time(LOOK_S)
        assert device.reader.looks == 3

    virtually(scenario)
