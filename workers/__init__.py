"""Engine processes, their supervisors, their slots, and one request's life."""

from workers.policy.liveness import Verdict
from workers.policy.repetition import RepetitionLimits
from workers.policy.restart import RestartPolicy
from workers.requests.prompts.bios import BiosPolicy
from workers.result import RequestResult, RequestState, RequestStatus
from workers.spec import EngineKind, WorkerSpec, WorkerTimeouts
from workers.tools.calls import Signal, ToolLimits, ToolRecord
from workers.tools.runner import PythonTools, ToolRunner, ToolRunners, ToolUse
from workers.worker import NO_SLOT_AVAILABLE, NOT_FOUND, Worker

__all__ = [
    "NOT_FOUND",
    "NO_SLOT_AVAILABLE",
    "BiosPolicy",
    "EngineKind",
    "PythonTools",
    "RepetitionLimits",
    "RequestResult",
    "RequestState",
    "RequestStatus",
    "RestartPolicy",
    "Signal",
    "ToolLimits",
    "ToolRecord",
    "ToolRunner",
    "ToolRunners",
    "ToolUse",
    "Verdict",
    "Worker",
    "WorkerSpec",
    "WorkerTimeouts",
]
