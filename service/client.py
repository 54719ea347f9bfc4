"""A trainer's side of weights that change while the engines work: for training loops, which are ordinary code.

``WeightsClient`` needs httpx alone; broadcasting needs torch (``torch.distributed`` with gloo), which is imported then.
Every wait has a limit, and no call that an engine may have begun is ever sent twice.
"""

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

if TYPE_CHECKING:
    import torch

ASK_LIMIT_S: Final = 60.0
POLL_S: Final = 20.0  # of one look that waits for an end
JOIN_POLL_S: Final = 0.1
AWAY_S: Final = 1.0
_ABANDONED: Final[list[Any]] = []
NO_CONTENT: Final = 204
IN_FLIGHT: Final = 5  # broadcasts under way at once
ATTEMPTS: Final = 2
BUCKET_BYTES: Final = 64 * 1024 * 1024  # of tensors that are broadcast together: hundreds of small ones are one
ALIGNMENT: Final = 64  # of each tensor within its bucket, in bytes


class WeightsError(Exception):
    """The service refused, or an update has failed; ``code`` is the service's word, ``document`` all that it said."""

    def __init__(self, text: str, code: str, document: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.code = code
        self.document = document


class WeightsClient:
    """Changes the weights of one model of a running Roundhouse; a context manager that closes its connections.

    ``model`` is the model's name in the configuration. Use one from one thread at a time.
    """

    def __init__(self, url: str, model: str, *, api_key: str | None = None, timeout_s: float = 1800.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = f"{url.rstrip('/')}/v1/models/{model}"
        self._http = httpx.Client(headers=headers, timeout=ASK_LIMIT_S)
        self._model = model
        self._timeout_s = timeout_s
        self._group: Any = None
        self._is_sending = False
        self._store: Any = None
        self._place = ("127.0.0.1", 0, 300.0)  # where the store listens, and how long all may take to come together
        self._group_number = 0
        self._digests: dict[str, str] = {}
        self._made = 0  # the version that these digests are of

    def __repr__(self) -> str:
        return f"<WeightsClient {self._model}>"

    def __enter__(self) -> Self:
        """Use it for a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Leave the group, and close all connections."""
        self._leave()
        self._http.close()

    def look(self) -> dict[str, Any]:
        """Return how the model's weights stand (``GET /v1/models/{model}/weights``).

        Raises:
            WeightsError: the service refused.
            httpx.TransportError: it cannot be reached.
        """
        return self._ask("GET", "/weights")

    @property
    def version(self) -> int:
        """The version that the model has now."""
        return int(self.look()["version"])

    # A checkpoint

    def update_checkpoint(
        self, folder: str, *, version: int | None = None, mode: str = "keep", clear_cache: bool = True
    ) -> dict[str, Any]:
        """Have every engine read a checkpoint: safetensors in ``folder``, which the engines' machine can read.

        Returns the update, ``completed`` or ``partial``.

        Raises:
            WeightsError: it was refused, or has failed; the model has the version that it had.
        """
        body = {"checkpoint": folder, "version": version, "mode": mode, "clear_cache": clear_cache, "wait": False}
        return self._wait(self._ask("POST", "/weights/update", body))

    # Adapters

    def load_adapter(self, name: str, path: str) -> dict[str, Any]:
        """Have every engine serve a LoRA adapter as a model of that name, and return it when agents may ask for it.

        ``path`` is on the service's machine: a folder in PEFT's form for vLLM, a GGUF file for llama.cpp. What is there
        may go away afterwards. A name stands for one version for ever.

        Raises:
            WeightsError: it was refused; nothing has changed.
        """
        return self._ask("POST", "/adapters", {"name": name, "path": path}, timeout_s=self._timeout_s)

    def unload_adapter(self, name: str) -> None:
        """Have every engine forget a LoRA adapter that no unfinished job uses.

        Raises:
            WeightsError: it was refused (``adapter_in_use``); nothing has changed.
        """
        self._ask("DELETE", f"/adapters/{name}", timeout_s=self._timeout_s)

    # A broadcast

    def init(self, *, address: str = "127.0.0.1", port: int = 0, timeout_s: float = 300.0) -> None:
        """Make a group with every engine of the model; this process is rank 0, and its store listens at ``address``.

        ``port`` 0 takes a free one. Call it again when the group is broken: engines that were started again are not in
        it. ``update`` does so by itself.

        Raises:
            WeightsError: an engine has not joined; the text says which.
        """
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # noqa: PLC0415

        self._leave()  # a port that was given comes free with the store of before
        self._digests = {}
        self._place = (address, port, timeout_s)
        limit = timedelta(seconds=timeout_s)
        self._store = TCPStore(address, port, None, True, limit, False)
        body = {"master_address": address, "master_port": self._store.port, "timeout_s": timeout_s}
        group = self._ask("POST", "/weights/init", body, timeout_s=self._timeout_s)["group"]
        self._group_number = group["number"]
        store = PrefixStore(group["key"], self._store)
        try:
            self._group = ProcessGroupGloo(store, 0, group["world_size"], limit)
        except RuntimeError as error:  # not all have come; the service knows who
            document = self.look()
            failure = (document["group"] or {}).get("error") or error
            raise WeightsError(f"the group has not come together: {failure}", "group_missing", document) from error
        self._wait_joined(group["number"], timeout_s)

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
        """Broadcast a model's tensors, by the names that its checkpoint has, and return the update when it is over.

        All of the model's tensors are wanted in one go, since engines fuse them; at most ``in_flight`` broadcasts are
        under way at once. None is returned, and nothing sent, where no byte differs from this client's last update.
        An update that has failed left every engine as it was, so it is made again, ``attempts`` times in all, with
        what serves by then; a checkpoint is not, since an engine that it broke is not to be broken twice.

        Raises:
            WeightsError: it was refused, or has failed; the text names who.
        """
        sent = [_Sent.of(name, tensor) for name, tensor in _items(tensors)]
        digests = {each.name: each.digest() for each in sent}
        if digests == self._digests and self._is_everywhere():
            return None
        body = {
            "tensors": [each.document for each in sent],
            "bucket_bytes": BUCKET_BYTES,
            "version": version,
            "mode": mode,
            "clear_cache": clear_cache,
        }
        ended = self._send(body, sent, in_flight, attempts)
        self._digests, self._made = digests, ended["version"]
        return ended

    def _send(self, body: dict[str, object], sent: "list[_Sent]", in_flight: int, attempts: int) -> dict[str, Any]:
        """Return an update when it is over; one that failed is made again while there are attempts left."""
        for left in reversed(range(attempts)):
            try:
                return self._send_once(body, sent, in_flight)
            except WeightsError as failed:
                if not left or failed.code != "weights_failed":
                    raise
            self._leave()
            self._wait_serving()
        raise ValueError(f"an update takes at least one attempt, and was given {attempts}")

    def _send_once(self, body: dict[str, object], sent: "list[_Sent]", in_flight: int) -> dict[str, Any]:
        self._ensure_group()
        update = self._post(body | {"group": self._group_number})
        try:
            self._broadcast(sent, in_flight)
        except RuntimeError as error:  # torch's word for a connection that broke, and for a time that is over
            self._leave()
            raise WeightsError(*self._blame(update, error)) from error
        return self._wait(update)

    def _wait_serving(self) -> None:
        """Return when an engine serves, or when none has for as long as a group may take to come together."""
        until = time.monotonic() + self._place[2]
        while not any(worker["in_rotation"] for worker in self.look()["workers"]) and time.monotonic() < until:
            time.sleep(AWAY_S)

    def _post(self, body: dict[str, object]) -> dict[str, Any]:
        """Post an update; where an engine has come or gone just now, the group is made again once."""
        try:
            return self._ask("POST", "/weights/update", body, timeout_s=self._timeout_s)
        except WeightsError as refused:
            if refused.code != "group_missing":
                raise
        self._leave()
        self._ensure_group()
        return self._ask("POST", "/weights/update", body | {"group": self._group_number}, timeout_s=self._timeout_s)

    def _is_everywhere(self) -> bool:
        """Whether what was sent last is what every engine has, or is being brought to by itself."""
        document = self.look()
        behind = [worker for worker in document["workers"] if worker["waits_for"] is not None]
        return document["version"] == self._made and (not behind or document["checkpoint"] is not None)

    def _leave(self) -> None:
        """Drop the group; to free one with a broadcast under way would block for as long as its limit."""
        if self._is_sending:
            _ABANDONED.append(self._group)
        self._group = self._store = None
        self._is_sending = False

    def _ensure_group(self) -> None:
        group = self.look()["group"] if self._group is not None else None
        if group is None or group["state"] != "ready" or group["number"] != self._group_number:
            address, port, timeout_s = self._place
            self.init(address=address, port=port, timeout_s=timeout_s)

    def _wait_joined(self, number: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s + ASK_LIMIT_S
        while True:
            document = self.look()
            group = document["group"]
            if group["number"] != number:
                raise WeightsError("another trainer has made a group since", "group_missing", document)
            if group["state"] == "ready":
                return
            if group["state"] == "broken" or time.monotonic() > until:
                raise WeightsError(f"the group has not come together: {group['error']}", "group_missing", document)
            time.sleep(JOIN_POLL_S)

    def _broadcast(self, sent: "list[_Sent]", in_flight: int) -> None:
        limit = timedelta(seconds=self._timeout_s)
        under_way: deque[Any] = deque()
        self._is_sending = True
        for bucket in _buckets(sent):
            under_way.append(self._group.broadcast(bucket, 0))
            if len(under_way) >= in_flight:
                under_way.popleft().wait(limit)
        while under_way:
            under_way.popleft().wait(limit)
        self._is_sending = False

    def _blame(self, update: dict[str, Any], error: Exception) -> tuple[str, str, Mapping[str, Any]]:
        """Return what the service has to say of a broadcast that broke here."""
        try:
            ended = self._wait(update)
        except WeightsError as refusal:
            return str(refusal), refusal.code, refusal.document
        return f"the broadcast has failed: {error}; the update is {ended['state']}", "broadcast_failed", ended

    # HTTP

    def _wait(self, update: dict[str, Any]) -> dict[str, Any]:
        """Return an update when it is over."""
        until = time.monotonic() + self._timeout_s
        while update["state"] == "running":
            if time.monotonic() > until:
                raise WeightsError(f"not over within {self._timeout_s:g} s", "timeout", update)
            query = {"update": update["number"], "wait_s": POLL_S}
            try:
                document = self._ask("GET", "/weights", query=query)
            except httpx.TransportError:  # it may be starting again; to look changes nothing
                time.sleep(AWAY_S)
                continue
            known = [each for each in document["updates"] if _place(each) == _place(update)]
            if not known:
                detail = f"the service knows nothing of it any more, and has weights {document['version']}"
                raise WeightsError(detail, "update_not_found", document)
            update = known[0]
        if update["state"] == "failed":
            raise WeightsError(f"weights {update['version']}: {update['error']}", "weights_failed", update)
        return update

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float = ASK_LIMIT_S,
    ) -> dict[str, Any]:
        answer = self._http.request(method, self._url + path, json=body, params=query, timeout=timeout_s)
        if answer.status_code == NO_CONTENT:
            return {}
        try:
            document: dict[str, Any] = answer.json()
        except ValueError as error:
            raise WeightsError(f"{answer.status_code}: no JSON", "no_json", {}) from error
        if answer.is_success:
            return document
        raise WeightsError(str(document.get("detail") or answer.status_code), str(document.get("code")), document)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A tensor as it goes over the wire: its bytes, on the CPU."""

    name: str
    dtype: str
    shape: list[int]
    raw: "torch.Tensor"

    @classmethod
    def of(cls, name: str, tensor: "torch.Tensor") -> Self:
        import torch  # noqa: PLC0415

        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        return cls(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), raw=flat)

    @property
    def document(self) -> dict[str, object]:
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape}

    def digest(self) -> str:
        shape = f"{self.dtype}{self.shape}".encode()
        return hashlib.blake2b(self.raw.numpy().data, digest_size=16, key=shape[:64]).hexdigest()


def _place(update: Mapping[str, Any]) -> tuple[int, int]:
    """Return what tells updates apart, over a start of the service too, which counts anew."""
    return update["number"], update["version"]


def _buckets(sent: "list[_Sent]") -> "Iterator[torch.Tensor]":
    """Put tensors one after the other, each at a multiple of ``ALIGNMENT``, until a bucket is full."""
    import torch  # noqa: PLC0415

    parts: list[Any] = []
    size = 0
    for each in sent:
        padding = -size % ALIGNMENT
        parts += [torch.zeros(padding, dtype=torch.uint8), each.raw]
        size += padding + len(each.raw)
        if size >= BUCKET_BYTES:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat([*parts, torch.zeros(-size % ALIGNMENT, dtype=torch.uint8)])


def _items(
    tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
) -> "Iterable[tuple[str, torch.Tensor]]":
    return tensors.items() if isinstance(tensors, Mapping) else tensors
