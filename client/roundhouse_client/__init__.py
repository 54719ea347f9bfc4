"""A client of Roundhouse: ``Client``, ``AsyncClient`` for asyncio, and ``TrainerClient`` for training loops.

It needs httpx but not the service. Values are in ``roundhouse_client.values``; all errors are in one tree.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundhouse_client.async_client import AsyncClient
    from roundhouse_client.client import Client
    from roundhouse_client.errors import (
        AccessDenied,
        AnswerLost,
        AnswerMalformed,
        Fault,
        InvalidRequest,
        NotFound,
        NothingAwaited,
        NothingToFork,
        NotNow,
        Refused,
        RoundhouseError,
        ServiceFailed,
        StateConflict,
        Unreachable,
        WaitExceeded,
        WeightsError,
    )
    from roundhouse_client.job_files import JobFileInvalid, load_job
    from roundhouse_client.trainer.trainer_client import TrainerClient
    from roundhouse_client.values.events import Event
    from roundhouse_client.values.job_document import JobDocument
    from roundhouse_client.values.jobs import BatchLine, Job
    from roundhouse_client.values.rollout_rows import RolloutRow
    from roundhouse_client.values.transcripts import Transcript, Turn
    from roundhouse_client.values.workers import Worker

# Imported on first use: the service needs only the values, and must not import a client.
_PLACES = {
    "AccessDenied": "errors",
    "AnswerLost": "errors",
    "AnswerMalformed": "errors",
    "AsyncClient": "async_client",
    "BatchLine": "values.jobs",
    "Client": "client",
    "Event": "values.events",
    "Fault": "errors",
    "InvalidRequest": "errors",
    "Job": "values.jobs",
    "JobDocument": "values.job_document",
    "JobFileInvalid": "job_files",
    "NotFound": "errors",
    "NothingAwaited": "errors",
    "NothingToFork": "errors",
    "NotNow": "errors",
    "Refused": "errors",
    "RolloutRow": "values.rollout_rows",
    "RoundhouseError": "errors",
    "ServiceFailed": "errors",
    "StateConflict": "errors",
    "TrainerClient": "trainer.trainer_client",
    "Transcript": "values.transcripts",
    "Turn": "values.transcripts",
    "Unreachable": "errors",
    "WaitExceeded": "errors",
    "WeightsError": "errors",
    "load_job": "job_files",
    "Worker": "values.workers",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public object
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


__all__ = [
    "AccessDenied",
    "AnswerLost",
    "AnswerMalformed",
    "AsyncClient",
    "BatchLine",
    "Client",
    "Event",
    "Fault",
    "InvalidRequest",
    "Job",
    "JobDocument",
    "JobFileInvalid",
    "NotFound",
    "NotNow",
    "NothingAwaited",
    "NothingToFork",
    "Refused",
    "RolloutRow",
    "RoundhouseError",
    "ServiceFailed",
    "StateConflict",
    "TrainerClient",
    "Transcript",
    "Turn",
    "Unreachable",
    "WaitExceeded",
    "WeightsError",
    "Worker",
    "load_job",
]
