"""The trainer's end of the NCCL group, with stand-ins for vLLM's classes: calls, their order, and time limits."""

import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from roundhouse_client.trainer.nccl_group import NcclGroup


class Tensor:
    """A tensor with the attributes that a broadcast reads."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_device(self, device: object) -> tuple[str, object]:
        return self.name, device


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """Return the calls to vLLM's classes, with modules of these names in their place."""
    asked: list[Any] = []
    stop = threading.Event()

    class Communicator:
        def __init__(self, group: object, device: object) -> None:
            asked.append(("communicator", group))
            self.device = device

        def broadcast(self, tensor: object, src: int, stream: object) -> None:
            if tensor == ("stuck", "cuda:1"):
                stop.wait()
            asked.append(("broadcast", tensor, src, stream))

    def create(**place: object) -> str:
        if place["world_size"] == 99:
            raise TimeoutError("the store has waited")
        asked.append(("create", place))
        return "group"

    stream = SimpleNamespace(synchronize=lambda: asked.append("synchronize"))
    chosen = threading.local()  # as CUDA's: another thread has the first
    chosen.device = 1
    cuda = SimpleNamespace(current_device=lambda: getattr(chosen, "device", 0), current_stream=lambda _device: stream)
    modules: dict[str, dict[str, Any]] = {
        "torch": {"cuda": cuda, "device": lambda kind, number: f"{kind}:{number}"},
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": Communicator},
        "vllm.distributed.utils": {"StatelessProcessGroup": SimpleNamespace(create=create)},
    }
    before = {name: sys.modules.get(name) for name in modules}
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    yield asked
    stop.set()
    for name, module in before.items():  # type: ignore[assignment]
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


def test_tensors_are_sent_in_order(told: list[Any]) -> None:
    """Rank 0 of a group with all engines sends each tensor by itself, from this process's device, and waits for it."""
    group = NcclGroup()
    assert (group.listen("127.0.0.1", 29500, 7.0), group.is_made) == (29500, False)
    group.join("key", 3, 7.0)
    place = {"host": "127.0.0.1", "port": 29500, "rank": 0, "world_size": 3, "store_timeout": 7}
    assert told == [("create", place), ("communicator", "group")]
    assert group.is_made
    told.clear()
    group.broadcast([Tensor("a"), Tensor("b")], 5, 7.0)  # type: ignore[list-item]
    assert told[0] == told[-1] == "synchronize"  # the trainer's tensors are computed, and sent ones are complete
    assert [each[1] for each in told[1:-1]] == [("a", "cuda:1"), ("b", "cuda:1")]
    assert {each[2] for each in told[1:-1]} == {0}
    group.leave()
    assert not group.is_made


def test_a_port_is_chosen_if_none_is_given(told: list[Any]) -> None:
    """The engines learn it before the store listens."""
    group = NcclGroup()
    port = group.listen("127.0.0.1", 0, 1.0)
    group.join("key", 2, 1.0)
    assert told[0][1]["port"] == port > 0


@pytest.mark.usefixtures("told")
def test_a_broadcast_without_end_is_given_up() -> None:
    """NCCL has no time limit; a trainer does."""
    group = NcclGroup()
    group.listen("127.0.0.1", 29500, 1.0)
    group.join("key", 2, 1.0)
    with pytest.raises(RuntimeError, match=r"not within 0\.05 s: all tensors were sent"):
        group.broadcast([Tensor("stuck")], 5, 0.05)  # type: ignore[list-item]


def test_an_engine_that_does_not_join_is_reported(told: list[Any]) -> None:
    """As an error that the trainer's client knows."""
    group = NcclGroup()
    group.listen("127.0.0.1", 29500, 1.0)
    with pytest.raises(RuntimeError, match="TimeoutError: the store has waited"):
        group.join("key", 99, 1.0)
    assert (group.is_made, told) == (False, [])
