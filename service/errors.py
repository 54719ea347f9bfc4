"""What can go wrong in the service, as its callers see it. Each leaf has a status of HTTP and a code for machines.

ServiceError
├── …                   what a request is refused for before anybody reads its body (service/api/errors.py)
├── BodyMalformed         400  the body is no JSON, or nested too deeply
├── BodyTooLarge          413
├── InvalidParameter      400  a query parameter or a header
├── InvalidJob            422  with every fault by its path
├── NotAuthorised         401
├── PathNotFound          404
├── JobNotFound           404
├── ConversationNotFound  404
├── WorkerNotFound        404
├── ModelNotFound         404  no such model, or not one of that kind
├── AdapterInvalid        422  an adapter that cannot be
├── AdapterNotFound       404  no adapter of that name was loaded
├── NameTaken             409  a name means one version of one thing
├── AdaptersTooMany       409  the engines were started with room for no more
├── AdapterInUse          409  unfinished jobs ask for it
├── UpdateInvalid         422  an update of weights that cannot be
├── UpdateNotFound        404  no update of weights of that number is known
├── UpdateUnderWay        409  one update of weights at a time
├── StaleVersion          409  versions of weights only rise
├── NoTrainerGroup        409  no group to broadcast weights in, or not with every engine
├── WeightsFailed         502  an update of weights has failed; it names who
├── EngineRefused         502  an engine did not do what it was told
├── ModelUnavailable      503  no engine of the model answers
├── IdempotencyConflict   409  the same key with another body
├── NotFinished           409  the result of a job that runs
├── NotEnded              409  the deletion of a job that runs
├── NoSlotAvailable       429
├── ShuttingDown          503
├── NotReady              503  a model has no ready worker
├── Crowded               503  too much waits already to be looked at
├── StoreUnavailable      503  the database is in trouble, and is tried again until it is well
├── StoreError            500  the store cannot read or write
│   └── StateUnusable     500  at a start alone: the state directory cannot be used, or is in use
└── ConfigError           of the command line alone: the configuration cannot be used
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong with what a caller gave: where, and what with its mend."""

    path: str
    message: str

    def __str__(self) -> str:
        """Say both."""
        return f"{self.path}: {self.message}" if self.path else self.message


class ServiceError(Exception):
    """Something in the service failed."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    retry_after_s: int | None = None
    faults: tuple[Fault, ...] = ()


class BodyMalformed(ServiceError):
    """The body is no JSON."""

    status = 400
    code = "body_malformed"
    title = "The body is not usable JSON"


class BodyTooLarge(ServiceError):
    """The body is larger than the limit."""

    status = 413
    code = "body_too_large"
    title = "The body is too large"


class InvalidParameter(ServiceError):
    """A query parameter or a header is not usable."""

    status = 400
    code = "invalid_parameter"
    title = "A parameter is not usable"


class InvalidJob(ServiceError):
    """The job is refused whole; ``faults`` lists everything that is wrong with it."""

    status = 422
    code = "invalid_job"
    title = "The job is refused"

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class NotAuthorised(ServiceError):
    """No key, or one that is not known."""

    status = 401
    code = "not_authorised"
    title = "A key is needed"


class PathNotFound(ServiceError):
    """No such path."""

    status = 404
    code = "not_found"
    title = "Not Found"


class JobNotFound(ServiceError):
    """No job of that id."""

    status = 404
    code = "job_not_found"
    title = "No such job"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id}")


class ConversationNotFound(ServiceError):
    """No conversation of that id in the job."""

    status = 404
    code = "conversation_not_found"
    title = "No such conversation"

    def __init__(self, job_id: str, conversation_id: str) -> None:
        super().__init__(f"there is no conversation {conversation_id} in job {job_id}")


class WorkerNotFound(ServiceError):
    """No worker of that id."""

    status = 404
    code = "worker_not_found"
    title = "No such worker"

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"there is no worker {worker_id}")


class ModelNotFound(ServiceError):
    """No model of that name, or none of that kind."""

    status = 404
    code = "model_not_found"
    title = "No such model"

    def __init__(self, model: str, models: Sequence[str], fitting: Sequence[str], kind: str) -> None:
        known = ", ".join(fitting) or "none"
        what = f"is no model {kind}" if model in models else "is no model"
        super().__init__(f"{model} {what}; those that are: {known}")


class UpdateInvalid(InvalidJob):
    """An update of weights that cannot be; nothing has changed."""

    code = "invalid_update"
    title = "The update is refused"


class AdapterInvalid(InvalidJob):
    """An adapter that cannot be, or a body that names none; nothing has changed."""

    code = "invalid_adapter"
    title = "The adapter is refused"


class AdapterNotFound(ServiceError):
    """No adapter of that name was loaded."""

    status = 404
    code = "adapter_not_found"
    title = "No such adapter"

    def __init__(self, model: str, name: str, *, is_configured: bool) -> None:
        what = "is one of the configuration, and stays" if is_configured else "was not loaded, or is on its way out"
        super().__init__(f"adapter {name} of {model} {what}")


class NameTaken(ServiceError):
    """A name means one version of one thing."""

    status = 409
    code = "name_taken"
    title = "The name means something else"


class AdaptersTooMany(ServiceError):
    """The model's engines were started with room for no more adapters."""

    status = 409
    code = "adapters_full"
    title = "There is room for no more adapters"


class AdapterInUse(ServiceError):
    """Unfinished jobs ask for it."""

    status = 409
    code = "adapter_in_use"
    title = "Unfinished jobs use the adapter"
    retry_after_s = 5


class UpdateNotFound(ServiceError):
    """No update of that number is known: it never was, or others have come since, or a start of the service."""

    status = 404
    code = "update_not_found"
    title = "No such update"


class UpdateUnderWay(ServiceError):
    """One update of a model's weights at a time."""

    status = 409
    code = "update_running"
    title = "Another update is under way"
    retry_after_s = 1


class StaleVersion(ServiceError):
    """Versions of weights only rise."""

    status = 409
    code = "version_not_newer"
    title = "The version is not newer"


class NoTrainerGroup(ServiceError):
    """There is no group to broadcast in, or not with every engine."""

    status = 409
    code = "group_missing"
    title = "The trainer's group has to be made again"


class WeightsFailed(ServiceError):
    """An update of weights has failed; the model has the version that it had before."""

    status = 502
    code = "weights_failed"
    title = "The update has failed"


class EngineRefused(ServiceError):
    """An engine did not do what it was told."""

    status = 502
    code = "engine_refused"
    title = "An engine refused"


class ModelUnavailable(ServiceError):
    """No engine of the model answers."""

    status = 503
    code = "no_worker_ready"
    title = "No engine of the model answers"
    retry_after_s = 5


class IdempotencyConflict(ServiceError):
    """The key was used with another body."""

    status = 409
    code = "idempotency_conflict"
    title = "The key was used with another body"

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} belongs to job {job_id}, whose body was another")


class NotFinished(ServiceError):
    """The job has no result yet."""

    status = 409
    code = "not_finished"
    title = "The job has not ended"
    retry_after_s = 1

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(f"job {job_id} is {state}")


class NotEnded(ServiceError):
    """Only a job that has ended can be deleted."""

    status = 409
    code = "not_ended"
    title = "The job has not ended"

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(f"job {job_id} is {state}; cancel it first, or wait for its end")


class NoSlotAvailable(ServiceError):
    """Not every first turn can start at once, and the caller asked not to wait."""

    status = 429
    code = "no_slot_available"
    title = "No slot is available"
    retry_after_s = 1


class ShuttingDown(ServiceError):
    """The service takes no new jobs."""

    status = 503
    code = "shutting_down"
    title = "The service is stopping"
    retry_after_s = 5


class Crowded(ServiceError):
    """Too much waits already to be looked at."""

    status = 503
    code = "crowded"
    title = "Too much waits to be looked at"
    retry_after_s = 5


class StoreUnavailable(ServiceError):
    """The database is in trouble; what was asked for is not known to be stored."""

    status = 503
    code = "store_unavailable"
    title = "The store is in trouble"
    retry_after_s = 5


class NotReady(ServiceError):
    """A model has no ready worker."""

    status = 503
    code = "not_ready"
    title = "Not every model has a ready worker"
    retry_after_s = 1

    def __init__(self, models: Sequence[str]) -> None:
        super().__init__(f"no ready worker for: {', '.join(models)}")
        self.faults = tuple(Fault(path=f"models.{model}", message="has no ready worker") for model in models)


class ConfigError(ServiceError):
    """The configuration cannot be used."""

    code = "invalid_configuration"
    title = "The configuration cannot be used"


class StoreError(ServiceError):
    """The store cannot read or write."""

    code = "store_error"
    title = "The store failed"


class StateUnusable(StoreError):
    """The state directory cannot be used, or another process uses it."""
