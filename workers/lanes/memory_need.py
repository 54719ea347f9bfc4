"""What a model takes of a device on a lane, by its files."""

from collections.abc import Iterable
from dataclasses import dataclass

from workers.devices.layout import Lane
from workers.files.model_memory import model_memory
from workers.spec import EngineKind, WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """MiB: ``least`` is what the model cannot do without, ``taken`` what its engine takes, None a whole lane's part."""

    least: int
    taken: int | None
    tokens: int  # of context that both are for


def memory_need(spec: WorkerSpec) -> MemoryNeed | None:
    """Read a model's memory need from the headers of its files; None if no file tells it."""
    known = model_memory(spec.model) if spec.model else None
    if known is None:
        return None
    # vLLM fills the part of the device that it is given, and wants one request's context at least.
    is_filling = spec.engine is EngineKind.VLLM
    tokens = spec.context if is_filling else spec.cache_tokens
    need = known.need_mib(tokens)
    return MemoryNeed(least=need or known.weights_mib, taken=None if is_filling else need, tokens=tokens)


def most_room(lanes: Iterable[Lane]) -> int | None:
    """Return the MiB of the device with the most room; None where one tells none, which may have any."""
    rooms = [lane.device.room_mib for lane in lanes]
    known = [room for room in rooms if room is not None]
    return max(known) if len(known) == len(rooms) else None
