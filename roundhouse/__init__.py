"""The door for Python programs: worker, inference engine and clients, each looked up where it is asked for.

``Worker`` and ``InferenceEngine`` want a Python environment of their own: this distribution brings packages with common
names, ``service``, ``workers`` and ``transport``. The clients are in ``roundhouse-client`` alone as well.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from roundhouse_client import AsyncClient, Client, TrainerClient
    from service import InferenceEngine, InferenceRequest
    from workers import Worker, WorkerSpec

__all__ = [
    "AsyncClient",
    "Client",
    "InferenceEngine",
    "InferenceRequest",
    "TrainerClient",
    "Worker",
    "WorkerSpec",
    "__version__",
]
_HOMES: Final = {
    **dict.fromkeys(("AsyncClient", "Client", "TrainerClient"), "roundhouse_client"),
    **dict.fromkeys(("InferenceEngine", "InferenceRequest", "__version__"), "service"),
    **dict.fromkeys(("Worker", "WorkerSpec"), "workers"),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has that name
    """Look a name up where it is asked for."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'roundhouse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
