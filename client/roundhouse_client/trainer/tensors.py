"""Tensors on the wire: their bytes on the trainer's device; for gloo small ones share a bucket."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    import torch

BUCKET_BYTES: Final = 64 * 1024 * 1024  # size from which a bucket is sent: hundreds of small tensors share one
ALIGNMENT: Final = 64  # alignment of each tensor in its bucket, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTensor:
    """A tensor to be sent: its bytes, on its own device."""

    name: str
    dtype: str
    shape: list[int]
    raw: "torch.Tensor"

    @classmethod
    def of(cls, name: str, tensor: "torch.Tensor") -> Self:
        """Return a tensor in its sent form; it stays on its device, and NCCL sends it from there."""
        import torch  # noqa: PLC0415 - only a broadcast needs it

        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return cls(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), raw=flat)

    def on_device(self, device: Any) -> "torch.Tensor":  # noqa: ANN401 - torch's type, and torch is optional
        """Return the tensor with its type and shape, on a device."""
        import torch  # noqa: PLC0415 - as above

        return self.raw.to(device).view(getattr(torch, self.dtype)).view(self.shape)

    @property
    def document(self) -> dict[str, object]:
        """The description that the service gets before the tensor."""
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape}

    def digest(self) -> str:
        """Return a digest of bytes, type and shape; it copies one tensor at a time to the host."""
        shape = f"{self.dtype}{self.shape}".encode()
        return hashlib.blake2b(self.raw.cpu().numpy().data, digest_size=16, key=shape[:64]).hexdigest()


def sent_tensors(tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]") -> list[SentTensor]:
    """Return tensors in their sent form, in order."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [SentTensor.of(name, tensor) for name, tensor in items]


def buckets(sent: Sequence[SentTensor]) -> "Iterator[torch.Tensor]":
    """Yield full buckets of tensors in order, each tensor at a multiple of ``ALIGNMENT``."""
    import torch  # noqa: PLC0415 - as above

    parts: list[Any] = []
    size = 0
    for each in sent:
        padding = -size % ALIGNMENT
        parts += [torch.zeros(padding, dtype=torch.uint8), each.raw.cpu()]
        size += padding + len(each.raw)
        if size >= BUCKET_BYTES:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat([*parts, torch.zeros(-size % ALIGNMENT, dtype=torch.uint8)])
