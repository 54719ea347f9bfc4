"""The worker as a library: ``Worker`` (specification, "Worker interface").

It keeps one engine running, takes requests while it has slots, and keeps each answer until it is fetched.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import TracebackType
from typing import Final, Literal, Self

import anyio

from workers.errors import NoSlot
from workers.health.incident import Evidence
from workers.offload.pool import offloading
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.policy.liveness import Verdict
from workers.policy.params import refuse_params
from workers.process.child import LEAVE_LIMIT_S
from workers.process.orphans import patrol
from workers.process.registry import open_registry
from workers.requests.answer import Answer
from workers.requests.in_flight import InFlightRequest
from workers.requests.request import Request, RequestId, parse_tools, user_conversation
from workers.requests.slots import Lease
from workers.spec import Tools, WorkerSpec
from workers.states import WorkerState
from workers.supervised import SupervisedWorker
from workers.tools.calls import Signal, ToolRecord
from workers.tools.definition import check_names

CANCELLED_BY_CALLER: Final = Cancelled(reason=CancelReason.CONVERSATION_ENDED)
logger = logging.getLogger(__name__)


class RequestState(StrEnum):
    """The state of a request."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """A request at one moment; ``verdict`` and ``evidence`` are None once it has ended."""

    id: RequestId
    job_name: str
    state: RequestState
    reason: FailureReason | CancelReason | None
    detail: str | None
    verdict: Verdict | None
    evidence: Evidence | None
    output_chars: int
    output_tokens: int
    tokens_per_s: float
    tool_iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """The tokens of a request over all its generations; None if the engine has not reported them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """The end of a request and its answer until then, whole or not; times are in seconds."""

    id: RequestId
    job_name: str
    state: RequestState
    reason: FailureReason | CancelReason | None
    detail: str | None
    text: str
    thinking: str
    tool_calls: tuple[ToolRecord, ...]
    signals: tuple[Signal, ...]
    finish_reason: str | None
    usage: TokenCount
    incarnation: int
    duration_s: float
    first_token_s: float | None


def state_of(outcome: Outcome | None) -> tuple[RequestState, FailureReason | CancelReason | None, str | None]:
    """Return the state and the reason of a request with this ending; None is a running request."""
    match outcome:
        case None:
            return RequestState.RUNNING, None, None
        case Completed():
            return RequestState.COMPLETED, None, None
        case EngineFailed() | RequestFailed():
            return RequestState.FAILED, outcome.reason, outcome.detail
        case Cancelled():
            return RequestState.CANCELLED, outcome.reason, None


def result_of(running: InFlightRequest, incarnation: int, ended_at: float) -> RequestResult:
    """Return the result of an ended request, with the incarnation that it was submitted to."""
    answer = running.answer
    state, reason, detail = state_of(running.ending)
    usage = answer.usage
    first_at = answer.first_token_at
    return RequestResult(
        id=running.id,
        job_name=running.job_name,
        state=state,
        reason=reason,
        detail=detail,
        text=answer.text,
        thinking=answer.reasoning,
        tool_calls=tuple(answer.tool_calls),
        signals=tuple(answer.signals),
        finish_reason=answer.generation.finish_reason,
        usage=TokenCount(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
        if usage
        else TokenCount(),
        incarnation=incarnation,
        duration_s=round(ended_at - answer.started_at, 6),
        first_token_s=None if first_at is None else round(first_at - answer.started_at, 6),
    )


class NotSubmitted(Enum):
    """Returned by ``submit`` instead of an id."""

    NO_SLOT_AVAILABLE = "no_slot_available"  # all slots are taken, or no engine is ready


class NotFound(Enum):
    """Returned for a request that does not exist, or no longer."""

    NOT_FOUND = "not_found"


NO_SLOT_AVAILABLE: Final = NotSubmitted.NO_SLOT_AVAILABLE
NOT_FOUND: Final = NotFound.NOT_FOUND


class _Submitted:
    """One request from its submission until its result is fetched."""

    def __init__(self, running: InFlightRequest, incarnation: int) -> None:
        self.running = running
        self.incarnation = incarnation
        self.ended = asyncio.Event()
        self.ended_at = 0.0


class Worker(SupervisedWorker):
    """One engine, its slots, and the requests submitted to it. For use within one event loop.

    ``async with Worker(spec) as worker`` starts and stops it; so do ``start`` and ``stop``.
    """

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(spec, environment)
        self._tools = parse_tools(spec.tools)
        self._exit_tools = parse_tools(spec.exit_tools)
        check_names(self._tools, self._exit_tools)
        self._submitted: dict[RequestId, _Submitted] = {}
        self._running: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._requests: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Start."""
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    @property
    def state(self) -> WorkerState:
        """The state of its engine at this moment."""
        return self.now.state

    async def start(self) -> None:
        """Return when the engine is ready; from then on the worker keeps it running.

        Raises:
            StartFailed: it has failed more often than ``restart`` allows. The worker goes on as ``restart`` says, until
                ``stop``.
        """
        async with self._starting:
            if self._running is None or self._running.done():
                started = asyncio.Event()
                self._running = asyncio.create_task(self._run_alone(started), name=f"worker {self.spec.id}")
                await started.wait()
            running = self._running
        if not running.done():
            self.start_nowait()
            await self._wait_ready_while(running)
        if running.done():
            if not running.cancelled():
                running.result()  # raises its error
            raise self.supervisor.failure()

    async def stop(self) -> None:
        """End all requests, the engine and all its processes; results can still be fetched.

        Raises:
            StopTimedOut: its processes do not die.
        """
        running = self._running
        if running is None or running.done():
            return
        try:
            await self.end_engine("asked to stop")
        finally:
            running.cancel()
            with anyio.CancelScope(shield=True):  # the caller may be cancelled meanwhile
                await asyncio.wait([running, *self._requests], timeout=2 * LEAVE_LIMIT_S)
            self.close_idle()

    async def submit(
        self,
        job_name: str,
        system_prompt: str,
        user_prompt: str,
        params: Mapping[str, object] | None = None,
        *,
        tools: Tools | None = None,
        exit_tools: Tools | None = None,
        markup: bool = False,
    ) -> RequestId | Literal[NotSubmitted.NO_SLOT_AVAILABLE]:
        """Start a request and return its id at once, or NO_SLOT_AVAILABLE; ``tools`` replace the spec's.

        Raises:
            InvalidTool: a definition is unusable, or two tools have one name.
            TypeError: a prompt is no text, or ``params`` no mapping.
            ValueError: ``params`` has one that may not be set.
        """
        for name, text in (("job_name", job_name), ("system_prompt", system_prompt), ("user_prompt", user_prompt)):
            if not isinstance(text, str):
                raise TypeError(f"{name}: {text!r} is no text")
        request = Request(
            job_name=job_name,
            system=system_prompt,
            conversation=user_conversation(user_prompt),
            params=refuse_params(params),
            tools=self._tools if tools is None else parse_tools(tools),
            exit_tools=self._exit_tools if exit_tools is None else parse_tools(exit_tools),
            markup=markup,
        )
        check_names(request.tools, request.exit_tools)
        if self._running is None or self._running.done():
            return NO_SLOT_AVAILABLE
        try:
            lease = self.lease_nowait()
        except NoSlot:
            return NO_SLOT_AVAILABLE
        submitted = _Submitted(self.requests.prepare(request.job_name, Answer(time.monotonic)), self.now.incarnation)
        self._submitted[submitted.running.id] = submitted
        task = asyncio.create_task(self._serve(request, submitted, lease))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return submitted.running.id

    async def get_status(self, request_id: int) -> RequestStatus | Literal[NotFound.NOT_FOUND]:
        """Return the status of a request."""
        submitted = self._submitted.get(RequestId(request_id))
        if submitted is None:
            return NOT_FOUND
        running = submitted.running
        is_running = running.ending is None
        state, reason, detail = state_of(running.ending)
        return RequestStatus(
            id=running.id,
            job_name=running.job_name,
            state=state,
            reason=reason,
            detail=detail,
            verdict=self.watch.judge(running).verdict if is_running else None,
            evidence=self.watch.observations.evidence(running) if is_running else None,
            output_chars=len(running.answer.text),
            output_tokens=running.answer.output_tokens,
            tokens_per_s=running.answer.generation.tokens_per_s,
            tool_iterations=running.answer.iterations_used,
        )

    async def get_result(self, request_id: int) -> RequestResult | Literal[NotFound.NOT_FOUND]:
        """Wait for a request's end, return its result, and forget it; after that it is NOT_FOUND."""
        submitted = self._submitted.get(RequestId(request_id))
        if submitted is None:
            return NOT_FOUND
        await submitted.ended.wait()
        if self._submitted.pop(submitted.running.id, None) is None:
            return NOT_FOUND  # another task has fetched it meanwhile
        return result_of(submitted.running, submitted.incarnation, submitted.ended_at)

    async def cancel(self, request_id: int) -> bool:
        """End a running request and keep its answer so far; return whether there was one."""
        submitted = self._submitted.get(RequestId(request_id))
        if submitted is None or submitted.running.ending is not None:
            return False
        submitted.running.end(CANCELLED_BY_CALLER)
        return True

    async def _wait_ready_while(self, running: asyncio.Task[None]) -> None:
        """Wait until the supervisor is ready, or has ended."""
        ready = asyncio.create_task(self.supervisor.wait_ready())
        try:
            await asyncio.wait([ready, running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not running.done():
            await ready

    async def _run_alone(self, started: asyncio.Event) -> None:
        """Own all tasks, the registry and the patrol, as a fleet does for its workers."""
        try:
            async with (
                offloading(),
                open_registry(self.spec.state_dir) as registry,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(patrol)
                await tasks.start(self.run, registry)
                started.set()
        finally:
            started.set()

    async def _serve(self, request: Request, submitted: _Submitted, lease: Lease) -> None:
        running = submitted.running
        try:
            with lease:
                await self.requests.perform(request, running.answer, running)
        except Exception as error:
            logger.exception(
                "worker %s: request %d of %s: a defect of ours", self.spec.id, running.id, running.job_name
            )
            running.end(RequestFailed(reason=FailureReason.INTERNAL, detail=f"{type(error).__name__}: {error}"))
        finally:
            running.end(Cancelled(reason=CancelReason.SHUTDOWN))  # applies only if nothing else has ended it
            submitted.ended_at = time.monotonic()
            submitted.ended.set()
