"""Tensors as they go over the wire: their bytes where the trainer has them, for gloo many small ones in one bucket."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    import torch

BUCKET_BYTES: Final = 64 * 1024 * 1024  # of tensors that are broadcast together: hundreds of small ones are one
ALIGNMENT: Final = 64  # of each tensor within its bucket, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTensor:
    """A tensor as it goes over the wire: its bytes, on the device that has it."""

    name: str
    dtype: str
    shape: list[int]
    raw: "torch.Tensor"

    @classmethod
    def of(cls, name: str, tensor: "torch.Tensor") -> Self:
        """Return a tensor as it is sent; it stays on its device, and NCCL sends it from there."""
        import torch  # noqa: PLC0415 - only a broadcast needs it

        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return cls(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), raw=flat)

    def on_device(self, device: Any) -> "torch.Tensor":  # noqa: ANN401 - torch's, which need not be there
        """Return it as a tensor of its own type and shape, on a device."""
        import torch  # noqa: PLC0415 - as above

        return self.raw.to(device).view(getattr(torch, self.dtype)).view(self.shape)

    @property
    def document(self) -> dict[str, object]:
        """The description that the service gets of it before."""
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape}

    def digest(self) -> str:
        """Return a digest of the bytes, the type and the shape; one tensor at a time is on the host for it."""
        shape = f"{self.dtype}{self.shape}".encode()
        return hashlib.blake2b(self.raw.cpu().numpy().data, digest_size=16, key=shape[:64]).hexdigest()


def sent_tensors(tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]") -> list[SentTensor]:
    """Return tensors as they are sent, in their order."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [SentTensor.of(name, tensor) for name, tensor in items]


def buckets(sent: Sequence[SentTensor]) -> "Iterator[torch.Tensor]":
    """Put tensors one after the other, each at a multiple of ``ALIGNMENT``, until a bucket is full."""
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
