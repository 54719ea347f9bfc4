"""The service's errors, as its callers see them: the leaves of one tree.

Refusals before a body is read are in ``service/api/errors/refusals.py``; what goes wrong in workers is
answered by the table of ``service/api/errors/problems.py``.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with what a caller gave: where, and what with its mend; ``line`` counts from 1 in its text."""

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        """Say both."""
        return f"{self.path}: {self.message}" if self.path else self.message


class ServiceError(Exception):
    """Something in the service failed; each leaf has a status of HTTP, and a code for machines."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    retry_after_s: int | None = None  # of the class, unless an instance knows better
    faults: tuple[Fault, ...] = ()

    def __init_subclass__(cls, **answer: int | str) -> None:
        """Set the class's answer: ``status``, ``code``, ``title``, ``retry_after_s``."""
        for name, value in answer.items():
            setattr(cls, name, value)


class BodyMalformed(ServiceError, status=400, code="body_malformed", title="The body is not usable JSON"):
    """The body is no JSON."""


class BodyTooLarge(ServiceError, status=413, code="body_too_large", title="The body is too large"):
    """The body is larger than the limit."""


class InvalidParameter(ServiceError, status=400, code="invalid_parameter", title="A parameter is not usable"):
    """A query parameter or a header is not usable."""


class InvalidJob(ServiceError, status=422, code="invalid_job", title="The job is refused"):
    """The job is refused whole; ``faults`` lists everything that is wrong with it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class ConfigRefused(ServiceError, status=422, code="config_invalid", title="The configuration is not usable"):
    """A reload found a configuration that no start would take; ``faults`` are what a start would have said."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class ReloadNeedsRestart(ServiceError, status=409, code="restart_needed", title="Only a restart can change that"):
    """A reload would change what cannot change while Roundhouse runs; ``faults`` name each setting with the reason."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class NotAuthorised(ServiceError, status=401, code="not_authorised", title="A key is needed"):
    """No key, or one that is not known."""


class PathNotFound(ServiceError, status=404, code="not_found", title="Not Found"):
    """No such path."""


class JobNotFound(ServiceError, status=404, code="job_not_found", title="No such job"):
    """No job of that id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} does not exist")


class ConversationNotFound(ServiceError, status=404, code="conversation_not_found", title="No such conversation"):
    """No conversation of that id in the job."""

    def __init__(self, job_id: str, conversation_id: str) -> None:
        super().__init__(f"job {job_id} has no conversation {conversation_id}")


class TurnNotFound(ServiceError, status=404, code="turn_not_found", title="No such turn"):
    """No such agent or round in the conversation."""

    def __init__(self, job_id: str, conversation_id: str, agent: str, round_number: int) -> None:
        super().__init__(
            f"conversation {conversation_id} of job {job_id} has no turn of {agent} in round {round_number}"
        )


class NotAwaited(ServiceError, status=409, code="not_awaited", title="The turn is not awaited"):
    """Nobody is waited for to speak the turn: not yet, not any more, or it was said in other words."""

    def __init__(self, agent: str, round_number: int, why: str) -> None:
        super().__init__(f"the turn of {agent} in round {round_number} is not awaited: {why}")


class InvalidWords(ServiceError, status=422, code="invalid_words", title="The words are not valid"):
    """The words of a caller are too many, or not what its agent has to say."""


class ToolServerDown(
    ServiceError, status=503, code="tool_server_down", title="A tool server has not told its tools", retry_after_s=5
):
    """An MCP server whose tools a job asks for was never reached."""

    def __init__(self, server: str, trouble: str) -> None:
        super().__init__(f"the MCP server {server} is not connected, and its tools are not known: {trouble}")


class WorkerNotFound(ServiceError, status=404, code="worker_not_found", title="No such worker"):
    """No worker of that id."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"worker {worker_id} does not exist")


class ModelNotFound(ServiceError, status=404, code="model_not_found", title="No such model"):
    """No model of that name, or none of that kind."""

    def __init__(self, model: str, models: Sequence[str], fitting: Sequence[str], kind: str) -> None:
        known = ", ".join(fitting) or "none"
        what = f"is not a model {kind}" if model in models else "is not a model"
        super().__init__(f"{model} {what}; those that are: {known}")


class ModelPinned(ServiceError, status=409, code="model_pinned", title="The model is pinned to its lane"):
    """Its engine would be started again at once."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} has pin: true, and would be loaded again at once; reload without it, then unload")


class NotOurEngine(ServiceError, status=409, code="not_our_engine", title="The engine is not ours to start or end"):
    """The engines of an attached model are others' own."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} is attached: its server was started elsewhere, and is ended there")


class UpdateInvalid(InvalidJob, code="invalid_update", title="The update is refused"):
    """An update of weights that cannot be; nothing has changed."""


class AdapterInvalid(InvalidJob, code="invalid_adapter", title="The adapter is refused"):
    """An adapter that cannot be, or a body that names none; nothing has changed."""


class AdapterNotFound(ServiceError, status=404, code="adapter_not_found", title="No such adapter"):
    """No adapter of that name was loaded."""

    def __init__(self, model: str, name: str, *, is_configured: bool) -> None:
        what = "is one of the configuration, and stays" if is_configured else "was not loaded, or is on its way out"
        super().__init__(f"adapter {name} of {model} {what}")


class AdapterInUse(
    ServiceError, status=409, code="adapter_in_use", title="Unfinished jobs use the adapter", retry_after_s=5
):
    """Unfinished jobs ask for it."""


class UpdateNotFound(ServiceError, status=404, code="update_not_found", title="No such update"):
    """No update of that number is known: it never was, or others have come since, or a start of the service."""


class WeightsFailed(ServiceError, status=502, code="weights_failed", title="The update has failed"):
    """An update of weights has failed; the model has the version that it had before."""


class IdempotencyConflict(
    ServiceError, status=409, code="idempotency_conflict", title="The key was used with another body"
):
    """The key was used with another body."""

    def __init__(self, key: str, job_id: str) -> None:
        key = key.rpartition("\n")[2]  # as its caller gave it
        super().__init__(f"Idempotency-Key {key!r} belongs to job {job_id}, whose body was another")


class NotFinished(ServiceError, status=409, code="not_finished", title="The job has not ended", retry_after_s=1):
    """The job has no result yet."""

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(f"job {job_id} is {state}")


class NotEnded(ServiceError, status=409, code="not_ended", title="The job has not ended"):
    """Only a job that has ended can be deleted."""

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(f"job {job_id} is {state}; cancel it first, or wait for its end")


class NoSlotAvailable(
    ServiceError, status=429, code="no_slot_available", title="No slot is available", retry_after_s=1
):
    """Not every first turn can start at once, and the caller asked not to wait."""


class TooMuchQueued(
    ServiceError, status=429, code="too_much_queued", title="Too much of the key waits", retry_after_s=5
):
    """As many turns of the key wait as may."""


class QueueFull(ServiceError, status=429, code="queue_full", title="Too many requests wait"):
    """As much waits for slots as may; ``after_s`` is when there should be room."""

    def __init__(self, detail: str, after_s: int) -> None:
        super().__init__(detail)
        self.retry_after_s = after_s


class ShuttingDown(ServiceError, status=503, code="shutting_down", title="The service is stopping", retry_after_s=5):
    """The service takes no new jobs."""


class UpgradeRefused(ServiceError, status=409, code="upgrade_refused", title="The service cannot be upgraded in place"):
    """The new code, or what runs at the moment, does not allow an upgrade in place; the service goes on as it was."""


class StoreUnavailable(
    ServiceError, status=503, code="store_unavailable", title="The store is in trouble", retry_after_s=5
):
    """The database is in trouble; what was asked for is not known to be stored."""


class NotReady(ServiceError, status=503, code="not_ready", title="Not every model has a ready worker", retry_after_s=1):
    """A model has no ready worker."""

    def __init__(self, models: Mapping[str, str]) -> None:
        told = f"no ready worker for: {', '.join(models)}" if models else "asked with a key, it is told what is missing"
        super().__init__(told)
        self.faults = tuple(
            Fault(path=f"models.{model}", message=f"has no ready worker: {trouble}")
            for model, trouble in models.items()
        )


class ConfigError(ServiceError, code="invalid_configuration", title="The configuration cannot be used"):
    """The configuration cannot be used."""


class StoreError(ServiceError, code="store_error", title="The store failed"):
    """The store cannot read or write."""


class StateUnusable(StoreError):
    """The state directory cannot be used, or another process uses it."""
