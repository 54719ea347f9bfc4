"""Makes spans of ended conversations, their turns, the turns' attempts, and their tool calls.

An answer being written costs nothing: a turn's spans are made at its end, with its recorded times. Only the span of a
conversation is open meanwhile, since its turns are its children.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.conversations.job.job import JobId, TurnKind
from service.conversations.job.states import ENDED_CONVERSATIONS, ConversationState, TurnState
from service.conversations.record.measures import AttemptMeasures, RequestMeasures
from service.conversations.record.transcript import Attempt, Turn
from service.store.records import ConversationMoved, Record, TurnEnded
from service.telemetry import span_names as names
from workers.distribution import own_version
from workers.fleet import Fleet
from workers.spec import EngineKind
from workers.tools.calls import ToolRecord

PROVIDERS: Mapping[EngineKind, str] = {
    EngineKind.LLAMA_SERVER: "llama.cpp",
    EngineKind.EMBEDDED: "llama.cpp",
    EngineKind.VLLM: "vllm",
    EngineKind.ATTACHED: "openai",  # the API that it is asked by
}
Attributes = Mapping[str, str | int]
MOST_PARENTS: Final = 10_000  # jobs whose callers' spans are remembered
Values = dict[str, AttributeValue]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def exporting_provider(instance: str) -> TracerProvider:
    """Return a provider that sends spans from its own thread; ``instance`` identifies the node.

    ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_BSP_*``, ``OTEL_TRACES_SAMPLER`` and similar variables configure it.
    """
    about = {names.SERVICE_VERSION: own_version(), names.SERVICE_INSTANCE: instance}
    if "OTEL_SERVICE_NAME" not in os.environ:
        about[names.SERVICE_NAME] = "roundhouse"
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def attributes_by_worker(fleet: Fleet) -> Callable[[str], Attributes]:
    """Return a function from a worker's id to the attributes of its engine."""

    def attributes(worker_id: str) -> Attributes:
        worker = fleet.get(worker_id)
        if worker is None:
            return {}
        endpoint = worker.endpoint
        return {
            names.PROVIDER: PROVIDERS[worker.spec.engine],
            names.SERVER_ADDRESS: endpoint.host,
            names.SERVER_PORT: endpoint.port,
        }

    return attributes


class _OpenConversation:
    """The span of a conversation, and its turns' span contexts with their readers; None is all agents."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = set_span_in_context(span, Context())
        self._turns: dict[int, dict[str, tuple[SpanContext, Collection[str] | None]]] = {}

    def __repr__(self) -> str:
        return f"<_OpenConversation rounds={list(self._turns)}>"

    def waited_for(self, turn: Turn, others: Collection[str]) -> list[Link]:
        """Return links to the turns that a turn waited for: ``others`` of its round, and those it read before it."""
        who = turn.key.agent_id
        now, before = self._turns.get(turn.key.round, {}), self._turns.get(turn.key.round - 1, {})
        read = [
            context for name, (context, readers) in before.items() if name == who or readers is None or who in readers
        ]
        return [Link(now[agent][0]) for agent in sorted(others) if agent in now] + [Link(each) for each in read]

    def note(self, turn: Turn, context: SpanContext, readers: Collection[str] | None) -> None:
        """Keep a turn's span context for later turns of its round and the next; agents may be rounds apart."""
        self._turns.setdefault(turn.key.round, {})[turn.key.agent_id] = context, readers


class Spans:
    """``engine_of`` returns a worker's engine attributes, ``name_of`` the caller's name of a job that has not ended."""

    def __init__(self, tracer: Tracer, engine_of: Callable[[str], Attributes], name_of: Callable[[JobId], str]) -> None:
        self._tracer = tracer
        self._engine_of = engine_of
        self._name_of = name_of
        self._propagator = TraceContextTextMapPropagator()
        self._parents: OrderedDict[JobId, str] = OrderedDict()
        self._open: dict[tuple[JobId, str], _OpenConversation] = {}

    def __repr__(self) -> str:
        return f"<Spans open={len(self._open)}>"

    def note_job(self, job_id: JobId, trace_parent: str) -> None:
        """Record the trace that a job was posted with; call it before any of its facts."""
        self._parents[job_id] = trace_parent
        while len(self._parents) > MOST_PARENTS:
            self._parents.popitem(last=False)

    def record_facts(self, facts: Iterable[Record]) -> None:
        """Make spans of facts."""
        for fact in facts:
            match fact:
                case ConversationMoved() if fact.state is ConversationState.RUNNING:
                    self._conversation(fact.job_id, fact.conversation_id, fact.at)
                case ConversationMoved() if fact.state in ENDED_CONVERSATIONS:
                    self._end_conversation(fact)
                case TurnEnded() if fact.turn.queued_at is not None:
                    self._add_turn(fact, fact.turn, fact.turn.queued_at)

    def close(self) -> None:
        """End the spans of conversations that continue after a restart."""
        for conversation in self._open.values():
            conversation.span.end()
        self._open.clear()

    # Jobs

    def _conversation(self, job_id: JobId, conversation_id: str, at: datetime) -> _OpenConversation:
        place = (job_id, conversation_id)
        if place not in self._open:
            attributes: Values = {
                names.OPERATION: names.INVOKE_WORKFLOW,
                names.CONVERSATION_ID: conversation_id,
                names.JOB_ID: job_id,
            }
            name = names.INVOKE_WORKFLOW
            with suppress(KeyError):  # the job has just ended
                attributes[names.WORKFLOW_NAME] = job_name = self._name_of(job_id)
                name = f"{name} {job_name}"
            parent = self._remote(self._parents.get(job_id))
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=_ns(at))
            self._open[place] = _OpenConversation(span)
        return self._open[place]

    def _end_conversation(self, fact: ConversationMoved) -> None:
        conversation = self._open.pop((fact.job_id, fact.conversation_id), None)
        if conversation is not None:
            _set_end(conversation.span, fact.state, fact.reason)
            conversation.span.end(_ns(fact.at))

    def _add_turn(self, fact: TurnEnded, turn: Turn, queued_at: datetime) -> None:
        # A conversation that was resumed after a restart has no open span yet.
        conversation = self._conversation(turn.key.job_id, turn.key.conversation_id, queued_at)
        span = self._tracer.start_span(
            f"{names.INVOKE_AGENT} {turn.key.agent_id}",
            conversation.context,
            attributes={
                names.OPERATION: names.INVOKE_AGENT,
                names.AGENT_ID: turn.key.agent_id,
                names.AGENT_NAME: turn.role,
                names.CONVERSATION_ID: turn.key.conversation_id,
                names.JOB_ID: turn.key.job_id,
                names.ROUND: turn.key.round,
                names.REQUEST_MODEL: fact.model,
            },
            links=conversation.waited_for(turn, fact.waited_for),
            start_time=_ns(queued_at),
        )
        if span.is_recording():
            context = set_span_in_context(span, Context())
            for attempt in turn.attempts[:-1] if fact.measures else turn.attempts:
                self._add_attempt(context, fact.model, attempt)
            if fact.measures is not None:
                chat = self._add_measured(context, names.CHAT, fact.model, fact.measures)
                self._add_tools(set_span_in_context(chat, Context()), fact.measures.began_at, turn.tool_calls)
        _set_end(span, turn.state, turn.reason)
        span.end(_ns(turn.finished_at or fact.at))
        if turn.kind is TurnKind.TURN:
            conversation.note(turn, span.get_span_context(), fact.readers)

    def _add_attempt(self, context: Context, model: str, attempt: Attempt) -> None:
        """Make the span of an attempt before the last, which has no measures."""
        about: Values = {
            names.OPERATION: names.CHAT,
            names.REQUEST_MODEL: model,
            names.WORKER: attempt.worker,
            names.INCARNATION: attempt.incarnation,
            **self._engine_of(attempt.worker),
        }
        span = self._tracer.start_span(
            f"{names.CHAT} {model}", context, SpanKind.CLIENT, about, start_time=_ns(attempt.started_at)
        )
        self._add_tools(set_span_in_context(span, Context()), attempt.started_at, attempt.tool_calls)
        _set_end(span, attempt.outcome, attempt.reason)
        span.end(_ns(attempt.finished_at))

    def _add_measured(self, context: Context, operation: str, model: str, attempt: AttemptMeasures) -> Span:
        prompt, cached, answer = attempt.usage
        about: Values = {
            names.OPERATION: operation,
            names.REQUEST_MODEL: model,
            names.WORKER: attempt.worker,
            names.INCARNATION: attempt.incarnation,
            names.INPUT_TOKENS: prompt,
            names.CACHED_TOKENS: cached,
            names.OUTPUT_TOKENS: answer,
            **self._engine_of(attempt.worker),
        }
        known: Mapping[str, AttributeValue | None] = {
            names.FINISH_REASONS: attempt.finish_reason and (attempt.finish_reason,),
            names.FIRST_CHUNK_S: attempt.first_token_s,
        }
        about |= {name: value for name, value in known.items() if value is not None}
        span = self._tracer.start_span(
            f"{operation} {model}", context, SpanKind.CLIENT, about, start_time=_ns(attempt.began_at)
        )
        _set_end(span, attempt.outcome, attempt.reason)
        span.end(_ns(attempt.began_at + timedelta(seconds=attempt.seconds)))
        return span

    def _add_tools(self, context: Context, began_at: datetime, calls: Sequence[ToolRecord]) -> None:
        """Make spans of tool calls; their starts are derived from the attempt's start and their order."""
        at, iteration, longest_s = began_at, 0, 0.0
        for call in calls:
            if call.iteration != iteration:  # calls of one message run in parallel
                at, iteration, longest_s = at + timedelta(seconds=longest_s), call.iteration, 0.0
            longest_s = max(longest_s, call.duration_s)
            name = call.name.encode("utf-8", "replace").decode()
            span = self._tracer.start_span(
                f"{names.EXECUTE_TOOL} {name}",
                context,
                attributes={
                    names.OPERATION: names.EXECUTE_TOOL,
                    names.TOOL_NAME: name,
                    names.TOOL_CALL_ID: call.id.encode("utf-8", "replace").decode(),
                },
                start_time=_ns(at),
            )
            _set_end(span, TurnState.COMPLETED if call.reason is None else TurnState.FAILED, call.reason)
            span.end(_ns(at + timedelta(seconds=call.duration_s)))

    # Requests of clients

    def take_request(self, request: RequestMeasures) -> None:
        """Make the spans of a client's ended request."""
        span = self._tracer.start_span(
            f"POST {request.path}",
            self._remote(request.trace_parent),
            SpanKind.SERVER,
            {
                names.HTTP_METHOD: "POST",
                names.HTTP_ROUTE: request.path,
                names.WAIT_S: request.waited_s,
            },
            start_time=_ns(request.began_at),
        )
        context = set_span_in_context(span, Context())
        for attempt in request.attempts:
            operation = names.OPERATIONS.get(request.path, names.CHAT)
            self._add_measured(context, operation, request.adapter or request.model, attempt)
        _set_end(span, request.outcome, request.reason)
        span.end(_ns(request.began_at + timedelta(seconds=request.seconds)))

    def _remote(self, trace_parent: str | None) -> Context:
        """Return the context of a ``traceparent`` header; a root's if it is missing or malformed."""
        headers: Mapping[str, str] = {} if trace_parent is None else {"traceparent": trace_parent}
        return self._propagator.extract(headers, Context())


def _set_end(span: Span, state: TurnState | ConversationState, reason: str | None) -> None:
    span.set_attribute(names.STATE, state.value)
    if reason is not None:
        span.set_attribute(names.ERROR_TYPE, str(reason))
    if state.value == TurnState.FAILED.value:
        span.set_status(Status(StatusCode.ERROR, str(reason or "")))


def _ns(at: datetime) -> int:
    since = at.astimezone(UTC) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000
