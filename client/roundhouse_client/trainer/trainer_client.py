"""``TrainerClient``: gives the engines of one model new weights and adapters."""

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from roundhouse_client.errors import WeightsError
from roundhouse_client.request import Nodes
from roundhouse_client.trainer import tensors as wire
from roundhouse_client.trainer.nccl_group import NcclGroup
from roundhouse_client.trainer.process_group import ProcessGroup
from roundhouse_client.trainer.tensors import SentTensor, sent_tensors
from roundhouse_client.trainer.weights_door import ASK_LIMIT_S, AWAY_S, WeightsDoor

if TYPE_CHECKING:
    import torch

JOIN_POLL_S: Final = 0.1
IN_FLIGHT: Final = 5  # most broadcasts under way at once
ATTEMPTS: Final = 2


class EnginesGroup:
    """The group that this process and every engine of a model are in, one after another, as the service sees it."""

    def __init__(self, door: WeightsDoor, backend: Literal["gloo", "nccl"]) -> None:
        self._door = door
        self._backend = backend
        self._group: ProcessGroup | NcclGroup = NcclGroup() if backend == "nccl" else ProcessGroup()
        self._place = ("127.0.0.1", 0, 300.0)  # the store's address and port, and the time for all to join
        self.number = 0

    def __repr__(self) -> str:
        return f"<EnginesGroup {self.number} {self._group!r}>"

    def disband(self) -> None:
        """Leave the group; the engines in it serve on."""
        self._group.leave()

    def broadcast(self, sent: Sequence[SentTensor], in_flight: int, timeout_s: float) -> None:
        """Send tensors to all; at most ``in_flight`` broadcasts are under way at once.

        Raises:
            RuntimeError: a connection broke, or a time limit passed.
        """
        self._group.broadcast(sent, in_flight, timeout_s)

    def make(self, address: str, port: int, timeout_s: float) -> None:
        """Make a group with every engine of the model.

        Raises:
            WeightsError: an engine did not join; the text says which.
        """
        self._group.leave()  # the old store frees a given port
        self._place = (address, port, timeout_s)
        port = self._group.listen(address, port, timeout_s)
        body = {"master_address": address, "master_port": port, "timeout_s": timeout_s, "backend": self._backend}
        group = self._door.init(body)["group"]
        self.number = group["number"]
        try:
            self._group.join(group["key"], group["world_size"], timeout_s)
        except RuntimeError as error:  # not all joined; the service knows which
            document = self._door.look()
            failure = (document["group"] or {}).get("error") or error
            raise WeightsError(f"the group has not formed: {failure}", "group_missing", document) from error
        self._wait_joined(timeout_s)

    def make_again(self) -> None:
        """Make a group at the place of the last one."""
        self.make(*self._place)

    def is_whole(self) -> bool:
        """Whether every engine of the model is in the group."""
        group = self._door.look()["group"] if self._group.is_made else None
        return group is not None and group["state"] == "ready" and group["number"] == self.number

    def wait_serving(self) -> None:
        """Return when an engine serves, or after the time limit for joining a group."""
        until = time.monotonic() + self._place[2]
        while not any(worker["in_rotation"] for worker in self._door.look()["workers"]) and time.monotonic() < until:
            time.sleep(AWAY_S)

    def _wait_joined(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s + ASK_LIMIT_S
        while True:
            document = self._door.look()
            group = document["group"]
            if group["number"] != self.number:
                raise WeightsError("another trainer has made a group since", "group_missing", document)
            if group["state"] == "ready":
                return
            if group["state"] == "broken" or time.monotonic() > until:
                raise WeightsError(f"the group has not formed: {group['error']}", "group_missing", document)
            time.sleep(JOIN_POLL_S)


class TrainerClient:
    """Changes the weights of one model of a running Roundhouse; a context manager that closes its connections.

    ``model`` is the model's name in the configuration. ``timeout_s`` bounds an update. ``url`` and ``api_key`` default
    to ``ROUNDHOUSE_URL`` and ``ROUNDHOUSE_API_KEY``. ``backend`` is the model's ``weights.backend``: ``gloo``, or
    ``nccl``, which needs vLLM and a GPU here. Where several nodes of a cluster serve the model, ``nodes`` says whether
    ``all`` get a checkpoint or an adapter, or ``this`` node alone; a group has the engines of one node. Use a client
    from one thread at a time. Methods return the service's documents.
    """

    def __init__(
        self,
        url: str | None,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 1800.0,
        backend: Literal["gloo", "nccl"] = "gloo",
        nodes: Nodes | None = None,
    ) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._door = WeightsDoor(url, model, api_key, timeout_s, nodes)
        self._group = EnginesGroup(self._door, backend)
        self._digests: dict[str, str] = {}
        self._made = 0  # the version of these digests

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._model}>"

    def __enter__(self) -> Self:
        """Use the client for a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Leave the group, and close all connections."""
        self._group.disband()
        self._door.close()

    def look(self) -> dict[str, Any]:
        """Return the state of the model's weights (``GET /v1/models/{model}/weights``).

        Raises:
            WeightsError: the service refused.
            Unreachable: it cannot be reached.
            AnswerLost: the connection broke.
        """
        return self._door.look()

    @property
    def version(self) -> int:
        """The model's present version."""
        return int(self.look()["version"])

    # A checkpoint

    def update_checkpoint(
        self, folder: str, *, version: int | None = None, mode: str = "keep", clear_cache: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint into every engine: safetensors in ``folder``, readable on the engines' machine.

        Returns the update, ``completed`` or ``partial``.

        Raises:
            WeightsError: it was refused, or failed; the model keeps its version.
        """
        body = {"checkpoint": folder, "version": version, "mode": mode, "clear_cache": clear_cache, "wait": False}
        return self._door.wait_over(self._door.update(body))

    # Adapters

    def load_adapter(self, name: str, path: str) -> dict[str, Any]:
        """Load a LoRA adapter onto every engine as a model of that name; return it once agents may ask for it.

        ``path`` is on the service's machine: a folder in PEFT's format for vLLM, a GGUF file for llama.cpp. It may be
        deleted afterwards. A name belongs to one version for ever.

        Raises:
            WeightsError: it was refused; nothing has changed.
        """
        return self._door.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine, if no unfinished job uses it.

        Raises:
            WeightsError: it was refused (``adapter_in_use``); nothing has changed.
        """
        self._door.unload_adapter(name)

    # A broadcast

    def init(self, *, address: str = "127.0.0.1", port: int = 0, timeout_s: float = 300.0) -> None:
        """Make a group with every engine of the model; this process is rank 0, and its store listens at ``address``.

        ``port`` 0 takes a free one. Call it again when the group is broken: restarted engines are not in it. ``update``
        does so by itself.

        Raises:
            WeightsError: an engine did not join; the text says which.
        """
        self._digests = {}
        self._group.make(address, port, timeout_s)

    def take_for_served(
        self, tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]", *, version: int = 0
    ) -> None:
        """Mark these tensors as sent: the trainer and the engines started from the same checkpoint.

        The next ``update`` with the same bytes sends nothing. ``version`` is the model's, 0 if none has come
        since the engines' start.

        Raises:
            WeightsError: the model has another version, so these are not its weights.
        """
        document = self.look()
        if document["version"] != version:
            message = f"the model has version {document['version']}, not {version}"
            raise WeightsError(message, "version_differs", document)
        self._digests = {each.name: each.digest() for each in sent_tensors(tensors)}
        self._made = version

    def update(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        *,
        version: int | None = None,
        mode: str = "keep",
        clear_cache: bool = True,
        in_flight: int = IN_FLIGHT,
        attempts: int = ATTEMPTS,
    ) -> dict[str, Any] | None:
        """Broadcast a model's tensors, by their names in the checkpoint, and return the finished update.

        Give all of the model's tensors at once, since engines fuse them; at most ``in_flight`` broadcasts are under way
        at once. If no byte differs from this client's last update, nothing is sent and None returned.
        A failed update leaves every engine as it was, so it is repeated, up to ``attempts`` in all, with the engines
        that serve by then. A checkpoint is not repeated: it may have broken an engine, and would break another.

        Raises:
            WeightsError: it was refused, or failed; the text names the engine.
        """
        sent = sent_tensors(tensors)
        digests = {each.name: each.digest() for each in sent}
        if digests == self._digests and self._is_everywhere():
            return None
        body = {
            "tensors": [each.document for each in sent],
            "bucket_bytes": wire.BUCKET_BYTES,
            "version": version,
            "mode": mode,
            "clear_cache": clear_cache,
        }
        ended = self._send(body, sent, in_flight, attempts)
        self._digests, self._made = digests, ended["version"]
        return ended

    def _send(
        self, body: dict[str, object], sent: Sequence[SentTensor], in_flight: int, attempts: int
    ) -> dict[str, Any]:
        """Return a finished update; a failed one is repeated while attempts are left."""
        for left in reversed(range(attempts)):
            try:
                return self._send_once(body, sent, in_flight)
            except WeightsError as failed:
                if not left or failed.code != "weights_failed":
                    raise
            self._group.disband()
            self._group.wait_serving()
        raise ValueError(f"an update takes at least one attempt, and was given {attempts}")

    def _send_once(self, body: dict[str, object], sent: Sequence[SentTensor], in_flight: int) -> dict[str, Any]:
        self._make_group()
        update = self._post(body | {"group": self._group.number})
        try:
            self._group.broadcast(sent, in_flight, self._timeout_s)
        except RuntimeError as error:  # torch's error for broken connections and for time limits
            self._group.disband()
            raise WeightsError(*self._blame(update, error)) from error
        return self._door.wait_over(update)

    def _post(self, body: dict[str, object]) -> dict[str, Any]:
        """Post an update; if an engine has just come or gone, make the group again once."""
        try:
            return self._door.update(body)
        except WeightsError as refused:
            if refused.code != "group_missing":
                raise
        self._group.disband()
        self._make_group()
        return self._door.update(body | {"group": self._group.number})

    def _blame(self, update: dict[str, Any], error: Exception) -> tuple[str, str, Mapping[str, Any]]:
        """Return the service's message, code and document for a broadcast that broke here."""
        try:
            ended = self._door.wait_over(update)
        except WeightsError as refusal:
            return str(refusal), refusal.code, refusal.document
        return f"the broadcast has failed: {error}; the update is {ended['state']}", "broadcast_failed", ended

    def _is_everywhere(self) -> bool:
        """Whether every engine has the last sent version, or will get it by itself."""
        document = self.look()
        behind = [worker for worker in document["workers"] if worker["waits_for"] is not None]
        return document["version"] == self._made and (not behind or document["checkpoint"] is not None)

    def _make_group(self) -> None:
        """Make the group again, unless every engine is in it."""
        if not self._group.is_whole():
            self._digests = {}
            self._group.make_again()
