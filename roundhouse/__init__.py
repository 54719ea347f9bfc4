"""The entry for Python programs: worker, inference engine and clients, each imported on first use.

``Worker`` and ``InferenceEngine`` need a Python environment of their own: this distribution has packages with common
names, ``service``, ``workers`` and ``transport``. ``roundhouse-client`` alone has the clients, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from roundhouse_client import (
        AsyncClient,
        Client,
        RoundhouseError,
        TrainerClient,
    )
    from service import (
        INFER_DONE,
        INFER_START,
        AgentExists,
        EngineClosed,
        InferenceEngine,
        InferenceError,
        InferenceFailed,
        InferenceRequest,
        NoLane,
        UnknownAgent,
        replay,
    )
    from workers import (
        NO_SLOT_AVAILABLE,
        NOT_FOUND,
        BiosPolicy,
        Capacity,
        EngineKind,
        InvalidSpec,
        InvalidTool,
        ModelUnavailable,
        PythonTools,
        RepetitionLimits,
        RequestResult,
        RequestState,
        RequestStatus,
        RestartPolicy,
        Signal,
        StartFailed,
        ToolLimits,
        ToolRecord,
        ToolRunner,
        ToolRunners,
        ToolUse,
        Verdict,
        WeightsPolicy,
        Worker,
        WorkerError,
        WorkerSpec,
        WorkerState,
        WorkerTimeouts,
    )

__all__ = [
    "INFER_DONE",
    "INFER_START",
    "NOT_FOUND",
    "NO_SLOT_AVAILABLE",
    "AgentExists",
    "AsyncClient",
    "BiosPolicy",
    "Capacity",
    "Client",
    "EngineClosed",
    "EngineKind",
    "InferenceEngine",
    "InferenceError",
    "InferenceFailed",
    "InferenceRequest",
    "InvalidSpec",
    "InvalidTool",
    "ModelUnavailable",
    "NoLane",
    "PythonTools",
    "RepetitionLimits",
    "RequestResult",
    "RequestState",
    "RequestStatus",
    "RestartPolicy",
    "RoundhouseError",
    "Signal",
    "StartFailed",
    "ToolLimits",
    "ToolRecord",
    "ToolRunner",
    "ToolRunners",
    "ToolUse",
    "TrainerClient",
    "UnknownAgent",
    "Verdict",
    "WeightsPolicy",
    "Worker",
    "WorkerError",
    "WorkerSpec",
    "WorkerState",
    "WorkerTimeouts",
    "__version__",
    "replay",
]
_OF_CLIENT: Final = frozenset({"AsyncClient", "Client", "RoundhouseError", "TrainerClient"})
_PACKAGES: Final = ("workers", "service")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public object
    """Import a name on first use."""
    if name in _OF_CLIENT:
        return getattr(import_module("roundhouse_client"), name)
    if name in __all__:
        home = next(package for package in map(import_module, _PACKAGES) if name in package.__all__)
        return getattr(home, name)
    raise AttributeError(f"module 'roundhouse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
