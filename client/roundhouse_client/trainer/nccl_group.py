"""The trainer's end of an NCCL group, through vLLM's own classes: from this process's GPU to the engines' GPUs.

Sources: vLLM, ``vllm.distributed.utils.StatelessProcessGroup`` and ``device_communicators.pynccl.PyNcclCommunicator``,
which its engines join with; ``weight_transfer.nccl_engine`` for the receiving side: each tensor by itself, in order.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from roundhouse_client.trainer.tensors import SentTensor


class NcclGroup:
    """One group after another, like ``ProcessGroup`` over gloo; it needs vLLM and a GPU in this environment.

    NCCL has no time limits: a wait that takes too long is left behind in its own thread.
    """

    def __init__(self) -> None:
        self._place = ("127.0.0.1", 0)
        self._communicator: Any = None

    def __repr__(self) -> str:
        return f"<NcclGroup made={self.is_made}>"

    @property
    def is_made(self) -> bool:
        """Whether there is a group here; only the service knows whether the others are still in it."""
        return self._communicator is not None

    def listen(self, address: str, port: int, timeout_s: float) -> int:  # noqa: ARG002 - the store listens in join()
        """Choose where the store will listen; return its port, which is free where ``port`` is 0."""
        if port == 0:
            with socket.socket() as probe:
                probe.bind((address, 0))
                port = probe.getsockname()[1]
        self._place = (address, port)
        return port

    def join(self, key: str, world_size: int, timeout_s: float) -> None:  # noqa: ARG002 - the port identifies the group
        """Make the group with all engines.

        Raises:
            RuntimeError: not all engines joined in time.
        """
        import torch  # noqa: PLC0415 - only a broadcast needs it

        address, port = self._place
        device = torch.device("cuda", torch.cuda.current_device())  # another thread's is the first GPU

        def make() -> object:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: PLC0415
            from vllm.distributed.utils import StatelessProcessGroup  # noqa: PLC0415

            group = StatelessProcessGroup.create(
                host=address, port=port, rank=0, world_size=world_size, store_timeout=max(1, int(timeout_s))
            )
            return PyNcclCommunicator(group, device=device)

        self._communicator = _within(timeout_s, "all engines have joined", make)

    def leave(self) -> None:
        """Drop the group."""
        self._communicator = None

    def broadcast(self, sent: Sequence[SentTensor], in_flight: int, timeout_s: float) -> None:  # noqa: ARG002 - a stream keeps order
        """Send tensors to all, one after the other.

        Raises:
            RuntimeError: NCCL failed, or the time limit passed.
        """
        import torch  # noqa: PLC0415 - as above

        communicator = self._communicator
        # Another thread's stream sends the tensors in place, so this one's must have finished them.
        torch.cuda.current_stream(communicator.device).synchronize()

        def send() -> None:
            stream = torch.cuda.current_stream(communicator.device)
            for each in sent:
                communicator.broadcast(each.on_device(communicator.device), src=0, stream=stream)
            stream.synchronize()

        _within(timeout_s, "all tensors were sent", send)


def _within(limit_s: float, what: str, act: Callable[[], object]) -> object:
    """Run ``act`` in a thread and return its result; a thread that takes too long is left behind.

    Raises:
        RuntimeError: it takes longer than ``limit_s``, or fails.
    """
    done: list[object] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(act())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=run, name="roundhouse nccl", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise RuntimeError(f"{type(failed[0]).__name__}: {failed[0]}") from failed[0]
    if not done:
        raise RuntimeError(f"not within {limit_s:g} s: {what}")
    return done[0]
