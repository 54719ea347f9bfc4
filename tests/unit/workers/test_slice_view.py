"""What an engine would see of a MIG slice: a program asks CUDA, here a stand-in for it, before the engine starts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio
import pytest

from tests.conftest import SpecFactory
from tests.harness.stand_ins import compiled
from tests.harness.waiting import LIMIT_S
from workers.devices import device_health as slice_view
from workers.devices.device import DeviceMemory
from workers.devices.device_health import DeviceHealth, check_view
from workers.devices.layout import Device, Lane, Layout
from workers.errors import SpawnFailed
from workers.notifier import Notifier
from workers.policy.restart import RestartPolicy
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

STAND_IN: Final = Path(__file__).with_name("cuda_stand_in.c")
PARENT_MIB: Final = 81920
SLICE: Final = Device(
    uuid="MIG-7",
    name="NVIDIA A100-SXM4-80GB 1g.10gb",
    memory_mib=10000,
    room_mib=9500,
    is_slice=True,
    visible={"CUDA_VISIBLE_DEVICES": "MIG-7", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
)
SHOWN: Final = "CUDA_VISIBLE_DEVICES=MIG-7, CUDA_DEVICE_ORDER=PCI_BUS_ID"
WRONG: Final = f"slice MIG-7 has 10000 MiB, and an engine would see 81920 MiB with {SHOWN}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(STAND_IN, tmp_path_factory.mktemp("cuda") / "libcuda.so.1")


@pytest.fixture
def show(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have programs see a device of this memory; devices they ask for are written to ``tmp_path / "asked"``."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("STAND_IN_ASKED", str(tmp_path / "asked"))

    def set_to(mib: int, **more: str) -> None:
        for name, value in {"STAND_IN_MIB": str(mib), **more}.items():
            monkeypatch.setenv(name, value)

    return set_to


def asked(folder: Path) -> list[str]:
    """Return the devices that were shown to the programs that asked."""
    file = folder / "asked"
    return file.read_text().splitlines() if file.exists() else []


def fault(device: Device = SLICE) -> str:
    with pytest.raises(SpawnFailed) as caught:
        check_view(device)
    return str(caught.value)


@pytest.mark.parametrize("mib", [9000, 10000, 11000], ids=["a-tenth-less", "all-of-it", "a-tenth-more"])
def test_a_slice_with_its_own_memory_is_accepted(show: Callable[..., None], tmp_path: Path, mib: int) -> None:
    """Nearly all of it, since the driver keeps a part. The program that asks sees what an engine would see."""
    show(mib)
    check_view(SLICE)
    assert asked(tmp_path) == ["MIG-7 PCI_BUS_ID"]


def test_a_slice_with_the_memory_of_the_whole_gpu_is_refused(show: Callable[..., None]) -> None:
    """An engine would fill its neighbours' memory. The message has both sizes, and the variables an engine gets."""
    show(PARENT_MIB)
    assert fault() == WRONG


@pytest.mark.parametrize("mib", [8999, 11001])
def test_more_than_a_tenth_of_difference_means_another_device(show: Callable[..., None], mib: int) -> None:
    """It may be another slice."""
    show(mib)
    assert fault() == f"slice MIG-7 has 10000 MiB, and an engine would see {mib} MiB with {SHOWN}"


def test_a_slice_of_unknown_memory_may_have_any(show: Callable[..., None]) -> None:
    """Only the number of devices can be checked."""
    show(PARENT_MIB)
    check_view(replace(SLICE, memory_mib=None))


@pytest.mark.parametrize("count", ["0", "2"])
def test_a_slice_is_one_device(show: Callable[..., None], count: str) -> None:
    """CUDA reports none for a removed slice."""
    show(10000, STAND_IN_COUNT=count)
    assert fault() == f"slice MIG-7 is not what an engine would see with {SHOWN}: {count} devices"


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceTotalMem_v2"])
def test_an_error_of_cuda_is_reported(show: Callable[..., None], name: str) -> None:
    """An engine would get it too."""
    show(10000, STAND_IN_FAILS=name)
    assert fault() == f"slice MIG-7 is not what an engine would see with {SHOWN}: {name}: error 999"


def test_a_driver_that_hangs_holds_up_no_start_for_ever(
    show: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asking program is ended."""
    monkeypatch.setattr(slice_view, "LIMIT_S", 0.1)
    show(10000, STAND_IN_HANGS="1")
    assert fault().startswith("slice MIG-7 cannot be looked at: ")


def test_without_the_library_the_check_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine would see a device either, and it would say so. A file that cannot be loaded counts as none."""
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    check_view(SLICE)


# Health of devices.


class Silent:
    """A reader of devices that reports nothing."""

    def memory(self) -> Mapping[str, DeviceMemory]:
        return {}

    def faults(self) -> Iterable[tuple[str, int]]:
        return ()

    def close(self) -> None:
        pass


async def test_a_slice_is_checked_until_it_is_right(show: Callable[..., None], tmp_path: Path) -> None:
    """Then never again. Another slice is checked separately, and a whole GPU never."""
    health = DeviceHealth(Silent())
    show(PARENT_MIB)
    for _ in range(2):
        with pytest.raises(SpawnFailed):
            await health.check_slice(SLICE)
    show(10000)
    for _ in range(2):
        await health.check_slice(SLICE)
    await health.check_slice(replace(SLICE, uuid="MIG-8", visible={"CUDA_VISIBLE_DEVICES": "MIG-8"}))
    await health.check_slice(replace(SLICE, uuid="GPU-0", is_slice=False, memory_mib=PARENT_MIB))
    assert asked(tmp_path) == ["MIG-7 PCI_BUS_ID"] * 3 + ["MIG-8 "]


def worker_on(device: Device, make_spec: SpecFactory, health: DeviceHealth, changed: Notifier) -> SupervisedWorker:
    spec = make_spec()
    lane = Lane(number=0, device=device, layout=Layout.C, memory_mib=device.room_mib, port=spec.port)
    return SupervisedWorker(
        replace(spec, lane=lane, restart=RestartPolicy(initial_s=0.01, max_s=0.01, failures=2, retry_s=None)),
        on_change=lambda _worker: changed.notify(),
        health=health,
    )


async def test_no_engine_starts_on_a_slice_that_is_another_device(
    show: Callable[..., None], scripted_spec: SpecFactory, tmp_path: Path
) -> None:
    """The worker gives the reason. After an operator's repair the slice is checked once more, and the engine starts."""
    show(PARENT_MIB)
    changed = Notifier()
    worker = worker_on(SLICE, scripted_spec, DeviceHealth(Silent()), changed)

    async def wait(state: WorkerState) -> None:
        await changed.wait_until(lambda: worker.now.state is state)

    def starts() -> int:
        return sum("listening" in line.text for line in worker.supervisor.log.tail(100))

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            await tasks.start(worker.run)
            worker.start_nowait()
            await wait(WorkerState.BACKOFF)
            assert worker.supervisor.because == WRONG
            await wait(WorkerState.FAILED)
            assert worker.supervisor.because == f"gave up after 2 failures in 600 s, the last: {WRONG}"
            assert (starts(), asked(tmp_path)) == (0, ["MIG-7 PCI_BUS_ID"] * 2)
            show(10000)
            worker.resume_nowait("mended")
            await wait(WorkerState.READY)
            worker.restart_nowait("once more")
            await wait(WorkerState.STARTING)
            await wait(WorkerState.READY)
            assert (starts(), asked(tmp_path)) == (2, ["MIG-7 PCI_BUS_ID"] * 3)
            tasks.cancel_scope.cancel()
