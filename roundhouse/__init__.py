"""The entry for Python programs: worker, inference engine and clients, each imported on first use.

``Worker`` and ``InferenceEngine`` need a Python environment of their own: this distribution has packages with common
names, ``service``, ``workers`` and ``transport``. ``roundhouse-client`` alone has the clients, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from roundhouse.inference.engine_status import EngineStatus
    from roundhouse.inference.event_log import INFER_DONE, INFER_START, replay
    from roundhouse.inference.failures import (
        AgentExists,
        EngineClosed,
        InferenceError,
        InferenceFailed,
        NoLane,
        UnknownAgent,
    )
    from roundhouse.inference.inference_engine import InferenceEngine, InferenceRequest
    from roundhouse_client import (
        AccessDenied,
        AnswerLost,
        AnswerMalformed,
        AsyncClient,
        Client,
        InvalidRequest,
        NotFound,
        NothingAwaited,
        NothingToFork,
        NotNow,
        Refused,
        RoundhouseError,
        ServiceFailed,
        StateConflict,
        TrainerClient,
        Unreachable,
        WaitExceeded,
        WeightsError,
    )
    from service.errors import ConfigError
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
    from workers.devices.layout import Lane

__all__ = [
    "INFER_DONE",
    "INFER_START",
    "NOT_FOUND",
    "NO_SLOT_AVAILABLE",
    "AccessDenied",
    "AgentExists",
    "AnswerLost",
    "AnswerMalformed",
    "AsyncClient",
    "BiosPolicy",
    "Capacity",
    "Client",
    "ConfigError",
    "EngineClosed",
    "EngineKind",
    "EngineStatus",
    "InferenceEngine",
    "InferenceError",
    "InferenceFailed",
    "InferenceRequest",
    "InvalidRequest",
    "InvalidSpec",
    "InvalidTool",
    "Lane",
    "ModelUnavailable",
    "NoLane",
    "NotFound",
    "NotNow",
    "NothingAwaited",
    "NothingToFork",
    "PythonTools",
    "Refused",
    "RepetitionLimits",
    "RequestResult",
    "RequestState",
    "RequestStatus",
    "RestartPolicy",
    "RoundhouseError",
    "ServiceFailed",
    "Signal",
    "StartFailed",
    "StateConflict",
    "ToolLimits",
    "ToolRecord",
    "ToolRunner",
    "ToolRunners",
    "ToolUse",
    "TrainerClient",
    "UnknownAgent",
    "Unreachable",
    "Verdict",
    "WaitExceeded",
    "WeightsError",
    "WeightsPolicy",
    "Worker",
    "WorkerError",
    "WorkerSpec",
    "WorkerState",
    "WorkerTimeouts",
    "__version__",
    "replay",
]
_HOMES: Final = {
    **dict.fromkeys(
        (
            "AccessDenied",
            "AnswerLost",
            "AnswerMalformed",
            "AsyncClient",
            "Client",
            "InvalidRequest",
            "NotFound",
            "NotNow",
            "NothingAwaited",
            "NothingToFork",
            "Refused",
            "RoundhouseError",
            "ServiceFailed",
            "StateConflict",
            "TrainerClient",
            "Unreachable",
            "WaitExceeded",
            "WeightsError",
        ),
        "roundhouse_client",
    ),
    "ConfigError": "service.errors",
    "EngineStatus": "roundhouse.inference.engine_status",
    "Lane": "workers.devices.layout",
    **dict.fromkeys(("INFER_DONE", "INFER_START", "replay"), "roundhouse.inference.event_log"),
    **dict.fromkeys(
        ("AgentExists", "EngineClosed", "InferenceError", "InferenceFailed", "NoLane", "UnknownAgent"),
        "roundhouse.inference.failures",
    ),
    **dict.fromkeys(("InferenceEngine", "InferenceRequest"), "roundhouse.inference.inference_engine"),
    "__version__": "service",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public object
    """Import a name on first use."""
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "workers")), name)
    raise AttributeError(f"module 'roundhouse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
