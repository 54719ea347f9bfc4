"""Runs inside vLLM's worker processes: receives weights that a trainer broadcasts over gloo.

vLLM mixes ``WeightReceiver`` into its worker class (``--worker-extension-cls``) and calls it through
``/collective_rpc``. During a call the engine does nothing else, so every call here returns at once: joining and
receiving are threads, whose state is polled. No failure of the trainer can hang the engine.

Their progress is written to a file, which costs the engine nothing to read: a call makes the engine's busy loop spin
for a while, and gloo has been seen to stand still beside that on few cores.

Weights are received into memory first and applied in one go, so that until then nothing has changed; they are kept
afterwards, until they are written for later workers. Uses only torch and safetensors, which vLLM brings.

Rank 0 broadcasts the bytes of each tensor, in the order of the list. With ``bucket_bytes``, tensors follow each other
in one broadcast, each at the next multiple of ``ALIGNMENT``, until a bucket has that many.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

POLL_S = 0.002
WINDOW = 5  # concurrent broadcasts, as on the trainer's side
ALIGNMENT = 64  # bytes; a view of another type must begin at a multiple of its size
WORDS = ("key", "group", "stage", "update", "received", "total", "error")


class Dropped(Exception):
    """These weights are no longer wanted."""


class GroupReceiver:
    """One worker process's place in a trainer's group, and the weights that it has received there."""

    def __init__(self) -> None:
        self.key = ""  # the group's name in the trainer's store
        self.file: str | None = None
        self.group = "none"  # none | joining | ready | failed
        self.stage = "idle"  # idle | receiving | received | applied | keeping | kept | failed
        self.update = 0
        self.received = 0
        self.total = 0
        self.error: str | None = None
        self._process_group: ProcessGroupGloo | None = None
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._round = 0  # threads of an earlier one change nothing any more
        self._abandoned: list[Any] = []  # freeing a group with a running operation blocks the thread

    def state(self) -> str:
        """Return the state as JSON."""
        return json.dumps({word: getattr(self, word) for word in WORDS})

    def tell(self) -> None:
        """Write the state to its file; a reader always finds it whole."""
        if self.file is not None:
            half = f"{self.file}.half"
            with contextlib.suppress(OSError):  # a reader gets nothing new, and gives up at its limit
                with open(half, "w") as file:  # noqa: PTH123
                    file.write(self.state())
                os.replace(half, self.file)  # noqa: PTH105

    def join(self, place: dict[str, Any], rank: int, file: str) -> None:
        """Begin to join the group whose rank 0 is the trainer; leave the earlier one."""
        self.leave()
        self.group, self.error, self.key, self.file = "joining", None, place["key"], file
        self.tell()

        def enter() -> ProcessGroupGloo:
            limit = timedelta(seconds=place["timeout_s"])
            store = TCPStore(place["address"], place["port"], None, False, limit)
            return ProcessGroupGloo(PrefixStore(place["key"], store), rank, place["world_size"], limit)

        def ready(group: ProcessGroupGloo) -> None:
            self._process_group, self.group = group, "ready"

        self._begin(enter, ready, lambda: setattr(self, "group", "failed"))

    def leave(self) -> None:
        """Leave the group, and drop weights that are being received."""
        self.drop()
        if self._process_group is not None:
            self._abandoned.append(self._process_group)
        self._process_group, self.group = None, "none"

    def receive(self, update: int, tensors: list[dict[str, Any]], bucket_bytes: int) -> None:
        """Begin to receive ``tensors`` (name, dtype, shape) in order."""
        group = self._process_group
        if group is None:
            raise RuntimeError(f"not in a trainer's group: {self.group}")
        self.drop()
        self.update, self.received, self.total, self.stage = update, 0, len(tensors), "receiving"
        self.tell()
        round_, weights = self._round, self._weights

        def take() -> None:
            waiting: list[tuple[torch.Tensor, list[Any], Any]] = []
            for size, places in plan([_size_of(tensor) for tensor in tensors], bucket_bytes):
                # As bytes: gloo knows fewer types than models have.
                bucket = torch.empty(size, dtype=torch.uint8)
                waiting.append((bucket, [(tensors[each], at) for each, at in places], group.broadcast(bucket, 0)))
                if len(waiting) >= WINDOW:
                    self._finish(waiting.pop(0), weights, round_)
            while waiting:
                self._finish(waiting.pop(0), weights, round_)

        self._begin(take, lambda _: setattr(self, "stage", "received"), self._fail)

    def _finish(
        self, waiting: tuple[torch.Tensor, list[Any], Any], weights: list[tuple[str, torch.Tensor]], round_: int
    ) -> None:
        bucket, places, work = waiting
        while not work.is_completed():
            if self._round != round_:
                raise Dropped
            time.sleep(POLL_S)
        work.wait()
        for tensor, at in places:
            flat = bucket[at : at + _size_of(tensor)].view(_type_of(tensor))
            weights.append((tensor["name"], flat.view(tensor["shape"])))
        self.received = len(weights)
        self.tell()

    def apply(self, reload_weights: Callable[..., None], update: int) -> None:
        """Put the received weights into the model."""
        if self.stage != "received" or self.update != update:
            raise RuntimeError(f"update {update} is not received: {self.stage} of update {self.update}")
        reload_weights(weights_iterator=iter(self._weights))
        self.stage = "applied"
        self.tell()

    def keep(self, folder: str, update: int) -> None:
        """Begin to write the applied weights as a checkpoint, for workers that start later."""
        if self.stage != "applied" or self.update != update:
            raise RuntimeError(f"there is nothing of update {update} to keep: {self.stage} of update {self.update}")
        self.stage = "keeping"
        round_, weights = self._round, dict(self._weights)
        self.tell()

        def write() -> None:
            from safetensors.torch import save_file  # noqa: PLC0415 - few need it

            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            half = os.path.join(folder, f".half-{os.getpid()}")  # noqa: PTH118
            save_file(weights, half)
            if self._round != round_:  # abandoned, and another may write there
                os.unlink(half)  # noqa: PTH108
                raise Dropped
            os.replace(half, os.path.join(folder, "model.safetensors"))  # noqa: PTH105, PTH118

        self._begin(write, lambda _: setattr(self, "stage", "kept"), self._fail)

    def forget(self, update: int) -> None:
        """Free the memory of an update's applied weights, which are kept by now or not wanted."""
        if self.stage in {"applied", "keeping", "kept"} and self.update == update:
            self._round += 1
            self._weights, self.stage = [], "idle"
            self.tell()

    def drop(self) -> None:
        """Drop the received weights, and stop receiving."""
        if self.stage == "receiving":  # the group is in the middle of an operation, and useless
            self._abandoned.append(self._process_group)
            self._process_group, self.group = None, "none"
        self._round += 1
        self._weights, self.stage, self.error = [], "idle", None
        self.tell()

    def _fail(self) -> None:
        self.stage, self.group = "failed", "failed"
        self._abandoned.append(self._process_group)
        self._process_group = None

    def _begin(self, what: Callable[[], Any], then: Callable[[Any], None], otherwise: Callable[[], None]) -> None:
        round_ = self._round

        def run() -> None:
            try:
                result = what()
            except Dropped:
                return
            except Exception as error:  # noqa: BLE001 - any error is reported
                if self._round == round_:
                    self.error = f"{type(error).__name__}: {error}".splitlines()[0][:500]
                    otherwise()
                    self.tell()
                return
            if self._round == round_:
                then(result)
                self.tell()
            elif result is not None:
                self._abandoned.append(result)

        threading.Thread(target=run, daemon=True, name="roundhouse-weights").start()


def _type_of(tensor: dict[str, Any]) -> Any:  # noqa: ANN401 - torch's types have no common name
    return getattr(torch, tensor["dtype"].removeprefix("torch."))


def _size_of(tensor: dict[str, Any]) -> int:
    return int(math.prod(tensor["shape"]) * _type_of(tensor).itemsize)


def plan(sizes: list[int], bucket_bytes: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return each broadcast's size, with its tensors and their offsets, as the trainer's side does."""
    buckets: list[tuple[int, list[tuple[int, int]]]] = []
    end, places = 0, []
    for each, size in enumerate(sizes):
        places.append((each, end))
        end += size
        if end >= bucket_bytes:
            buckets.append((end, places))
            end, places = 0, []
        end = -(-end // ALIGNMENT) * ALIGNMENT
    return [*buckets, (end, places)] if places else buckets


def repack_shared(model: torch.nn.Module) -> None:
    """Copy new values of a weight into the layers that share it.

    On a CPU vLLM keeps a packed copy of some weights beside them, and after a reload packs those of the layers that
    received any. An output head that is tied to the input's embedding receives none, and would go on with the old ones
    (0.32, ``model_loader/reload/layerwise.py``).
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        for weight in layer.parameters(recurse=False):
            owners.setdefault(id(weight), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            if hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)


class WeightReceiver:
    """The class that vLLM mixes into its workers; each call returns the receiver's state as JSON."""

    def _roundhouse(self) -> GroupReceiver:
        receiver = self.__dict__.get("_roundhouse_receiver")
        if receiver is None:
            receiver = self.__dict__["_roundhouse_receiver"] = GroupReceiver()
        return receiver

    def roundhouse_state(self) -> str:
        """Return the receiver's state."""
        return self._roundhouse().state()

    def roundhouse_join(self, place: dict[str, Any], first_rank: int, file: str) -> str:
        """Begin to join a trainer's group; this engine's processes have the ranks from ``first_rank``."""
        config = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        index = getattr(config, "data_parallel_index", 0) or 0
        own = index * config.world_size + self.rank  # type: ignore[attr-defined]
        receiver = self._roundhouse()
        receiver.join(place, first_rank + own, f"{file}.{own}")
        return receiver.state()

    def roundhouse_receive(self, update: int, tensors: list[dict[str, Any]], bucket_bytes: int) -> str:
        """Begin to receive."""
        receiver = self._roundhouse()
        receiver.receive(update, tensors, bucket_bytes)
        return receiver.state()

    def roundhouse_apply(self, update: int) -> str:
        """Apply the received weights; the engine must be paused."""
        receiver = self._roundhouse()
        receiver.apply(self.reload_weights, update)  # type: ignore[attr-defined]
        repack_shared(self.model_runner.get_model())  # type: ignore[attr-defined]
        return receiver.state()

    def roundhouse_reload(self, weights_path: str) -> str:
        """Read a checkpoint; the engine must be paused."""
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        repack_shared(self.model_runner.get_model())  # type: ignore[attr-defined]
        return self._roundhouse().state()

    def roundhouse_keep(self, folder: str, update: int) -> str:
        """Begin to write a checkpoint of the applied weights, in one process only: each has them all."""
        receiver = self._roundhouse()
        if self.rank == 0:  # type: ignore[attr-defined]
            receiver.keep(folder, update)
        return receiver.state()

    def roundhouse_forget(self, update: int) -> str:
        """Free the memory of an update's applied weights."""
        receiver = self._roundhouse()
        receiver.forget(update)
        return receiver.state()

    def roundhouse_drop(self) -> str:
        """Drop the received weights."""
        receiver = self._roundhouse()
        receiver.drop()
        return receiver.state()
