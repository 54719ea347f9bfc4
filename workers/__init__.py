"""Engine processes, their supervisors, their slots, and one request's life."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from workers.errors import InvalidSpec, InvalidTool, ModelUnavailable, StartFailed, WorkerError
    from workers.policy.liveness import Verdict
    from workers.policy.repetition import RepetitionLimits
    from workers.policy.restart import RestartPolicy
    from workers.policy.weights import WeightsPolicy
    from workers.requests.bios_words import BiosPolicy
    from workers.spec import Capacity, EngineKind, WorkerSpec, WorkerTimeouts
    from workers.states import WorkerState
    from workers.tools.calls import Signal, ToolLimits, ToolRecord
    from workers.tools.runner import PythonTools, ToolRunner, ToolRunners, ToolUse
    from workers.worker import NO_SLOT_AVAILABLE, NOT_FOUND, RequestResult, RequestState, RequestStatus, Worker

__all__ = [
    "NOT_FOUND",
    "NO_SLOT_AVAILABLE",
    "BiosPolicy",
    "Capacity",
    "EngineKind",
    "InvalidSpec",
    "InvalidTool",
    "ModelUnavailable",
    "PythonTools",
    "RepetitionLimits",
    "RequestResult",
    "RequestState",
    "RequestStatus",
    "RestartPolicy",
    "Signal",
    "StartFailed",
    "ToolLimits",
    "ToolRecord",
    "ToolRunner",
    "ToolRunners",
    "ToolUse",
    "Verdict",
    "WeightsPolicy",
    "Worker",
    "WorkerError",
    "WorkerSpec",
    "WorkerState",
    "WorkerTimeouts",
]
_HOMES: Final = {
    "BiosPolicy": "workers.requests.bios_words",
    "Capacity": "workers.spec",
    "EngineKind": "workers.spec",
    "InvalidSpec": "workers.errors",
    "InvalidTool": "workers.errors",
    "ModelUnavailable": "workers.errors",
    "NOT_FOUND": "workers.worker",
    "NO_SLOT_AVAILABLE": "workers.worker",
    "PythonTools": "workers.tools.runner",
    "RepetitionLimits": "workers.policy.repetition",
    "RequestResult": "workers.worker",
    "RequestState": "workers.worker",
    "RequestStatus": "workers.worker",
    "RestartPolicy": "workers.policy.restart",
    "Signal": "workers.tools.calls",
    "StartFailed": "workers.errors",
    "ToolLimits": "workers.tools.calls",
    "ToolRecord": "workers.tools.calls",
    "ToolRunner": "workers.tools.runner",
    "ToolRunners": "workers.tools.runner",
    "ToolUse": "workers.tools.runner",
    "Verdict": "workers.policy.liveness",
    "WeightsPolicy": "workers.policy.weights",
    "Worker": "workers.worker",
    "WorkerError": "workers.errors",
    "WorkerSpec": "workers.spec",
    "WorkerState": "workers.states",
    "WorkerTimeouts": "workers.spec",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: a command that runs no engine starts in a third of the time."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(name)
