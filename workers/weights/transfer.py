"""The ways in which weights get into an engine, with their work in each phase of an update."""

from collections.abc import Callable
from typing import Final, Protocol

import anyio

from transport.control import EngineControl
from transport.errors import EngineRejected
from workers.weights.group import Group
from workers.weights.receiver import ReceiverFiles, ask
from workers.weights.update import UpdateRequest, WorkerProgress

STATE_POLL_S: Final = 0.02


class Transfer(Protocol):
    """One way. ``receive_weights`` must call ``tell`` once the engine has begun, so that a trainer may send."""

    needs_all: bool  # whether nothing can be received while one worker is missing
    is_staged: bool  # whether a worker that failed to receive still has all of its old weights

    async def start(self, control: EngineControl, update: int, request: UpdateRequest) -> None:
        """Make the engine ready to receive."""

    async def receive_weights(
        self,
        control: EngineControl,
        update: int,
        request: UpdateRequest,
        share: WorkerProgress,
        tell: Callable[[], None],
    ) -> None:
        """Return when the engine has received."""

    async def finish(self, control: EngineControl, update: int, version: int) -> None:
        """Return when the engine has only its new weights."""

    async def drop(self, control: EngineControl) -> None:
        """Drop the tensors that the engine was about to receive."""


async def reload_checkpoint(control: EngineControl, folder: str, *, is_extended: bool) -> None:
    """Reload a checkpoint in a paused engine; our extension also reaches layers that share weights.

    Raises:
        EngineError: it has not, or not all of it.
    """
    call = "roundhouse_reload" if is_extended else "reload_weights"
    await control.call_workers(call, {"weights_path": folder})


class CheckpointTransfer:
    """Each engine reads a checkpoint from the disk itself."""

    needs_all = False
    is_staged = False

    def __init__(self, *, is_extended: bool) -> None:
        self._is_extended = is_extended

    async def start(self, control: EngineControl, update: int, request: UpdateRequest) -> None:
        """Do nothing: the checkpoint was checked before any engine was changed."""

    async def receive_weights(
        self,
        control: EngineControl,
        _update: int,
        request: UpdateRequest,
        _share: WorkerProgress,
        tell: Callable[[], None],
    ) -> None:
        """Reload the checkpoint."""
        tell()
        await reload_checkpoint(control, str(request.checkpoint), is_extended=self._is_extended)

    async def finish(self, control: EngineControl, _update: int, version: int) -> None:
        """Set the engine's version label."""
        await control.label(version)

    async def drop(self, control: EngineControl) -> None:
        """Do nothing: there is nothing to drop."""


class GlooTransfer:
    """A trainer broadcasts over gloo to our extension inside the engines; applied when all have received."""

    needs_all = True
    is_staged = True

    def __init__(self, group: Group, files: ReceiverFiles) -> None:
        self._group = group
        self._files = files

    async def start(self, control: EngineControl, _update: int, _request: UpdateRequest) -> None:
        """Check that the engine still has its place in the group."""
        for state in await ask(control, "state"):
            if (state.key, state.group) != (self._group.key, "ready"):
                raise EngineRejected(409, "no_group", f"its place in the trainer's group is {state.group}")

    async def receive_weights(
        self,
        control: EngineControl,
        update: int,
        request: UpdateRequest,
        share: WorkerProgress,
        tell: Callable[[], None],
    ) -> None:
        """Begin to receive, and poll the engine until it has every tensor."""
        tensors = [tensor.document for tensor in request.tensors]
        share.total = len(tensors)
        asked = {"update": update, "tensors": tensors, "bucket_bytes": request.bucket_bytes}
        states = await ask(control, "receive", asked)
        tell()
        while any(state.stage != "received" for state in states):
            for state in states:
                if state.stage not in {"receiving", "received"}:
                    raise EngineRejected(500, "broadcast", f"{state.received} of {state.total} tensors: {state.error}")
            share.received = min(state.received for state in states)
            await anyio.sleep(STATE_POLL_S)
            states = self._files.read(share.worker, self._group.members[share.worker].size)
        share.received = share.total

    async def finish(self, control: EngineControl, update: int, version: int) -> None:
        """Put the received weights in place."""
        await ask(control, "apply", {"update": update})
        await control.label(version)

    async def drop(self, control: EngineControl) -> None:
        """Stop receiving, and drop the tensors."""
        await ask(control, "drop")


class NativeTransfer:
    """vLLM's own endpoints (since 0.21): a trainer broadcasts over NCCL, straight into the weights."""

    needs_all = True
    is_staged = False

    async def start(self, control: EngineControl, _update: int, _request: UpdateRequest) -> None:
        """Start an update: the engine takes its weights apart."""
        await control.post("/start_weight_update", {})

    async def receive_weights(
        self,
        control: EngineControl,
        _update: int,
        request: UpdateRequest,
        _share: WorkerProgress,
        tell: Callable[[], None],
    ) -> None:
        """Receive the tensors; the caller bounds the time."""
        info = {
            "names": [tensor.name for tensor in request.tensors],
            "dtype_names": [tensor.dtype.removeprefix("torch.") for tensor in request.tensors],
            "shapes": [list(tensor.shape) for tensor in request.tensors],
        }
        await control.post("/update_weights", {"update_info": info}, on_sent=tell)

    async def finish(self, control: EngineControl, _update: int, version: int) -> None:
        """Finish the update: the engine puts its weights together again."""
        await control.post("/finish_weight_update", {"weight_version": str(version)})

    async def drop(self, control: EngineControl) -> None:
        """Do nothing: an engine that failed to receive is restarted."""
