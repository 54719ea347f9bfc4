"""The service's errors as its callers see them: the leaves of one tree.

Refusals before a body is read are in ``service/api/errors/refusals.py``; the table in
``service/api/errors/problems.py`` answers errors of workers.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in a caller's input: its place, and the message with a remedy; ``line`` counts from 1 in the text."""

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        """Return place and message."""
        return f"{self.path}: {self.message}" if self.path else self.message


class ServiceError(Exception):
    """A failure in the service; each leaf has an HTTP status, and a code for programs."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    retry_after_s: int | None = None  # an instance may override its class
    faults: tuple[Fault, ...] = ()

    def __init_subclass__(cls, **answer: int | str) -> None:
        """Set the class's answer: ``status``, ``code``, ``title``, ``retry_after_s``."""
        for name, value in answer.items():
            setattr(cls, name, value)


class BodyMalformed(ServiceError, status=400, code="body_malformed", title="The body is not usable JSON"):
    """The body is not JSON."""


class BodyTooLarge(ServiceError, status=413, code="body_too_large", title="The body is too large"):
    """The body is larger than the limit."""


class InvalidParameter(ServiceError, status=400, code="invalid_parameter", title="A parameter is not usable"):
    """A query parameter or a header is not usable."""


class InvalidJob(ServiceError, status=422, code="invalid_job", title="The job is refused"):
    """The whole job is refused; ``faults`` lists everything that is wrong with it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class ConfigRefused(ServiceError, status=422, code="config_invalid", title="The configuration is not usable"):
    """A reload found a configuration that a start would refuse; ``faults`` are the faults of that start."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class ReloadNeedsRestart(ServiceError, status=409, code="restart_needed", title="Only a restart can change that"):
    """A reload would change settings that need a restart; ``faults`` name each with the reason."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class NotAuthorised(ServiceError, status=401, code="not_authorised", title="A key is needed"):
    """The key is missing or not known."""


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


class NotAwaited(ServiceError, status=409, code="not_awaited", title="The turn does not wait for a caller"):
    """The turn does not wait for a caller: not yet, no longer, or it was said with other words."""

    def __init__(self, agent: str, round_number: int, why: str) -> None:
        super().__init__(f"the turn of {agent} in round {round_number} does not wait for a caller: {why}")


class InvalidWords(ServiceError, status=422, code="invalid_words", title="The words are not valid"):
    """A caller's words are too long, or do not fit its agent's validation."""


class ToolServerDown(
    ServiceError, status=503, code="tool_server_down", title="A tool server has not listed its tools", retry_after_s=5
):
    """A job asks for tools of an MCP server that was never reached."""

    def __init__(self, server: str, trouble: str) -> None:
        super().__init__(f"the MCP server {server} is not connected, so its tools are unknown: {trouble}")


class WorkerNotFound(ServiceError, status=404, code="worker_not_found", title="No such worker"):
    """No worker of that id."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"worker {worker_id} does not exist")


class ModelNotFound(ServiceError, status=404, code="model_not_found", title="No such model"):
    """No model of that name, or none of that kind."""

    def __init__(self, model: str, models: Sequence[str], fitting: Sequence[str], kind: str) -> None:
        known = ", ".join(fitting) or "none"
        self.model = model
        what = f"is not a model {kind}" if model in models else "is not a model"
        super().__init__(f"{model} {what}; models that are: {known}")


class ModelPinned(ServiceError, status=409, code="model_pinned", title="The model is pinned to its lane"):
    """The model's engine would be started again at once."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} has pin: true and would be loaded again at once; reload without pin, then unload")


class NotOurEngine(ServiceError, status=409, code="not_our_engine", title="The engine is not ours to start or stop"):
    """An attached model's engines belong to somebody else."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} is attached: start and stop its server where it runs")


class UpdateInvalid(InvalidJob, code="invalid_update", title="The update is refused"):
    """The weight update is not valid; nothing has changed."""


class AdapterInvalid(InvalidJob, code="invalid_adapter", title="The adapter is refused"):
    """The adapter is not valid, or the body names none; nothing has changed."""


class AdapterNotFound(ServiceError, status=404, code="adapter_not_found", title="No such adapter"):
    """No adapter of that name was loaded."""

    def __init__(self, model: str, name: str, *, is_configured: bool) -> None:
        what = "is in the configuration and stays" if is_configured else "was not loaded, or is being unloaded"
        super().__init__(f"adapter {name} of {model} {what}")


class AdapterInUse(
    ServiceError, status=409, code="adapter_in_use", title="Unfinished jobs use the adapter", retry_after_s=5
):
    """Unfinished jobs use the adapter."""


class UpdateNotFound(ServiceError, status=404, code="update_not_found", title="No such update"):
    """No update of that number is known: it never existed, or is gone after later updates or a restart."""


class WeightsFailed(ServiceError, status=502, code="weights_failed", title="The update has failed"):
    """The weight update has failed; the model keeps its version."""


class IdempotencyConflict(
    ServiceError, status=409, code="idempotency_conflict", title="The key was used with another body"
):
    """The key was used with another body."""

    def __init__(self, key: str, job_id: str) -> None:
        key = key.rpartition("\n")[2]  # the caller's part of it
        super().__init__(f"Idempotency-Key {key!r} belongs to job {job_id}, whose body was different")


class RewardConflict(ServiceError, status=409, code="reward_conflict", title="There is another reward already"):
    """A conversation, an agent in it, or a session, has another reward."""

    def __init__(self, whose: str) -> None:
        super().__init__(f"{whose} has another reward, which stays")


class SessionNotFound(ServiceError, status=404, code="session_not_found", title="No such session"):
    """There is no such session, or it belongs to another key, or it has expired."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"there is no session {session_id[:100]!r}")


class SessionsFull(
    ServiceError, status=429, code="sessions_full", title="There are too many sessions", retry_after_s=60
):
    """There are as many sessions, or exchanges of one, as there may be."""


class SessionInvalid(InvalidJob, code="invalid_session", title="The session is refused"):
    """The session cannot be opened as posted."""


class NothingRecorded(ServiceError, status=409, code="nothing_recorded", title="The job records no tokens"):
    """The job has no agent whose tokens are recorded."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} records no tokens; give record: {{tokens: true}} at the job or at an agent")


class RewardInvalid(InvalidJob, code="invalid_reward", title="The reward is refused"):
    """The reward is for no part of the job."""


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
    ServiceError, status=429, code="too_much_queued", title="Too many turns of the key wait", retry_after_s=5
):
    """The key's bound on waiting turns is reached."""


class QueueFull(ServiceError, status=429, code="queue_full", title="Too many requests wait"):
    """The bound on waiting requests is reached; ``after_s`` is when there should be room."""

    def __init__(self, detail: str, after_s: int) -> None:
        super().__init__(detail)
        self.retry_after_s = after_s


class NodeUnreachable(ServiceError, status=502, code="node_unreachable", title="Another node does not answer"):
    """The node that serves a model could not be reached, or stopped answering."""

    def __init__(self, model: str, trouble: str) -> None:
        super().__init__(f"{model} is served by another node, and {trouble}")


class NodesFailed(ServiceError, status=502, code="nodes_failed", title="Not all nodes have made the change"):
    """A change of all nodes failed on some; ``faults`` has each node's address and its reason, or that it has it."""

    def __init__(self, faults: Sequence[Fault], done: Sequence[str], status: int | None) -> None:
        super().__init__(f"made on {len(done)} nodes, and refused or failed on {len(faults)}")
        self.faults = (*faults, *(Fault(path=url, message="has made the change") for url in done))
        if status is not None:  # all nodes have the same reason
            self.__dict__["status"] = status


class NodesUnnamed(ServiceError, status=409, code="nodes_unnamed", title="Other nodes serve the model too"):
    """Weights would change on one of several nodes, whose answers would differ from then on."""

    def __init__(self, model: str, others: int) -> None:
        super().__init__(f"{others} other nodes serve {model} too: give ?nodes=all, or ?nodes=this for this one alone")


class NoLeader(
    ServiceError, status=503, code="no_worker_ready", title="No engine of the model answers", retry_after_s=5
):
    """No node serves a model now that some have, or whose engine spans them."""


class ShuttingDown(ServiceError, status=503, code="shutting_down", title="The service is stopping", retry_after_s=5):
    """The service takes no new jobs."""


class UpgradeRefused(ServiceError, status=409, code="upgrade_refused", title="The service cannot be upgraded in place"):
    """The new code or the running work does not allow an upgrade in place; the service goes on unchanged."""


class StoreUnavailable(
    ServiceError, status=503, code="store_unavailable", title="The store is unavailable", retry_after_s=5
):
    """The database is in trouble; the request may not have been stored."""


class NotReady(ServiceError, status=503, code="not_ready", title="Not every model has a ready worker", retry_after_s=1):
    """A model has no ready worker."""

    def __init__(self, models: Mapping[str, str]) -> None:
        text = f"no ready worker for: {', '.join(models)}" if models else "a request with a key is told what is missing"
        super().__init__(text)
        self.faults = tuple(
            Fault(path=f"models.{model}", message=f"has no ready worker: {trouble}")
            for model, trouble in models.items()
        )


class ConfigError(ServiceError, code="invalid_configuration", title="The configuration cannot be used"):
    """The configuration cannot be used."""


class StoreError(ServiceError, code="store_error", title="The store failed"):
    """The store cannot read or write."""


class StateUnusable(StoreError):
    """The state directory or its store cannot be used, or another process uses it."""
