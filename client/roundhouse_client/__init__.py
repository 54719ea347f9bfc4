"""A client of Roundhouse: ``Client``, ``AsyncClient`` for asyncio, and ``TrainerClient`` for training loops.

It needs httpx and nothing of the service. Values are in ``roundhouse_client.values``, errors form one tree.
"""

from roundhouse_client.async_client import AsyncClient
from roundhouse_client.client import Client
from roundhouse_client.errors import (
    AccessDenied,
    AnswerLost,
    AnswerMalformed,
    Fault,
    InvalidRequest,
    NotFound,
    NotNow,
    Refused,
    RoundhouseError,
    ServiceFailed,
    StateConflict,
    Unreachable,
    WaitExceeded,
    WeightsError,
)
from roundhouse_client.trainer.trainer_client import TrainerClient
from roundhouse_client.values.events import Event
from roundhouse_client.values.job_document import JobDocument
from roundhouse_client.values.jobs import BatchLine, Job
from roundhouse_client.values.transcripts import Transcript, Turn
from roundhouse_client.values.workers import Worker

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
    "NotFound",
    "NotNow",
    "Refused",
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
]
