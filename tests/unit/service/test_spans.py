"""The spans of a conversation, made from facts, and their cost when they are off."""

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from service.config.schema import Config
from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.record.measures import AttemptMeasures, RequestMeasures, UsageCounts
from service.conversations.record.transcript import Attempt, Turn
from service.errors import ConfigError
from service.node.node import open_node
from service.store.records import ConversationMoved, TurnEnded
from service.telemetry import span_names as names
from service.telemetry.span_maker import Spans
from workers.spec import EngineKind, WorkerSpec
from workers.tools.calls import ToolRecord

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = JobId("j")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ATTEMPT = AttemptMeasures(
    model="m",
    worker="m-0",
    incarnation=2,
    outcome=TurnState.COMPLETED,
    reason=None,
    began_at=NOW + timedelta(seconds=1),
    seconds=2.0,
    used=UsageCounts(),
    usage=(10, 4, 5),
    first_token_s=0.25,
    finish_reason="stop",
)


class Recorder:
    """Keeps spans in memory, by name."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = Spans(
            provider.get_tracer(names.SCOPE), lambda _worker: {names.SERVER_PORT: 9100}, lambda _: "debate"
        )

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def moved(state: ConversationState, reason: str | None = None, seconds: float = 0.0) -> ConversationMoved:
    at = NOW + timedelta(seconds=seconds)
    return ConversationMoved(job_id=JOB, conversation_id="c", state=state, reason=reason, at=at)


def ended(agent: str, number: int = 0, waited_for: tuple[str, ...] = (), **fields: object) -> TurnEnded:
    turn = Turn(
        key=TurnKey(JOB, "c", agent, number),
        state=TurnState.COMPLETED,
        role="speaker",
        attempts=(attempt(TurnState.COMPLETED, None),),
        queued_at=NOW,
        finished_at=NOW + timedelta(seconds=3),
    )
    turn = replace(turn, **fields)
    return TurnEnded(turn=turn, at=NOW, model="m", measures=ATTEMPT, waited_for=waited_for)


def attempt(outcome: TurnState, reason: str | None) -> Attempt:
    return Attempt(
        outcome=outcome,
        reason=reason,
        detail=None,
        text="",
        worker="m-0",
        incarnation=1,
        started_at=NOW,
        finished_at=NOW + timedelta(seconds=1),
    )


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def test_a_conversation_holds_its_turns_and_each_its_attempts_and_calls() -> None:
    """They have the conventions' names, and the times of each."""
    recorder = Recorder()
    call = ToolRecord(
        iteration=0, id="call-1", name="now", arguments={"secret": "plan"}, result="secret", duration_s=0.5
    )
    recorder.spans.record_facts([moved(ConversationState.RUNNING), ended("a", tool_calls=(call,))])
    recorder.spans.record_facts([moved(ConversationState.COMPLETED, seconds=4)])
    workflow, agent = recorder.one("invoke_workflow debate"), recorder.one("invoke_agent a")
    chat, tool = recorder.one("chat m"), recorder.one("execute_tool now")
    assert workflow.parent is None
    parents = [child.parent.span_id if child.parent else None for child in (agent, chat, tool)]
    assert parents == [id_of(workflow), id_of(agent), id_of(chat)]
    assert len({span.context.trace_id for span in (workflow, agent, chat, tool) if span.context}) == 1
    assert chat.kind is SpanKind.CLIENT
    assert dict(chat.attributes or {}) == {
        names.OPERATION: "chat",
        names.REQUEST_MODEL: "m",
        names.WORKER: "m-0",
        names.INCARNATION: 2,
        names.INPUT_TOKENS: 10,
        names.CACHED_TOKENS: 4,
        names.OUTPUT_TOKENS: 5,
        names.SERVER_PORT: 9100,
        names.FINISH_REASONS: ("stop",),
        names.FIRST_CHUNK_S: 0.25,
        names.STATE: "completed",
    }
    assert [(each.end_time or 0) - (each.start_time or 0) for each in (workflow, agent, chat, tool)] == [
        4_000_000_000,
        3_000_000_000,
        2_000_000_000,
        500_000_000,
    ]
    assert "secret" not in str([span.to_json() for span in (workflow, agent, chat, tool)])


def test_a_turn_is_linked_to_those_that_it_waited_for() -> None:
    """It links to the turns it hears in its round and in the round before, however far other agents are."""
    recorder = Recorder()
    hidden = [replace(ended("x", number), readers=("m",)) for number in range(4)]
    recorder.spans.record_facts(
        [moved(ConversationState.RUNNING), *hidden, ended("a"), ended("b"), ended("m", 0, ("a",)), ended("a", 1)]
    )
    first = {name: id_of(recorder.named(f"invoke_agent {name}")[0]) for name in "abm"}
    moderator, again = recorder.one("invoke_agent m"), recorder.named("invoke_agent a")[1]
    assert [link.context.span_id for link in moderator.links] == [first["a"]]
    assert {link.context.span_id for link in again.links} == set(first.values())


def test_a_failed_attempt_and_a_failed_turn_give_the_reason() -> None:
    """``error.type`` has the word of our reasons."""
    recorder = Recorder()
    earlier = (attempt(TurnState.FAILED, "engine_died"), attempt(TurnState.FAILED, "deadline"))
    fact = ended("a", state=TurnState.FAILED, reason="deadline", attempts=earlier)
    fact = replace(fact, measures=replace(ATTEMPT, outcome=TurnState.FAILED, reason="deadline"))
    recorder.spans.record_facts([moved(ConversationState.RUNNING), fact, moved(ConversationState.FAILED, "deadline")])
    attempts = recorder.named("chat m")
    assert [(span.attributes or {})[names.ERROR_TYPE] for span in attempts] == ["engine_died", "deadline"]
    told = [recorder.one("invoke_agent a"), recorder.one("invoke_workflow debate"), *attempts]
    assert {span.status.status_code for span in told} == {StatusCode.ERROR}


@pytest.mark.parametrize(("header", "is_taken"), [(PARENT, True), ("nonsense", False), ("", False)])
def test_the_trace_that_a_job_was_posted_with_is_its_parent(header: str, *, is_taken: bool) -> None:
    """The header is the W3C's ``traceparent``; a malformed one starts a new trace."""
    recorder = Recorder()
    recorder.spans.note_job(JOB, header)
    recorder.spans.record_facts([moved(ConversationState.RUNNING), moved(ConversationState.COMPLETED)])
    parent = recorder.one("invoke_workflow debate").parent
    told = None if parent is None else (f"{parent.trace_id:032x}", f"{parent.span_id:016x}")
    assert told == (("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331") if is_taken else None)


def test_a_clients_request_is_a_span_with_its_attempts() -> None:
    """Its parent is the client's span, and its operation is that of its path."""
    recorder = Recorder()
    request = RequestMeasures(
        key=TurnKey(JobId("request-1"), "0", "request", 0),
        path="/v1/embeddings",
        model="m",
        adapter=None,
        outcome=TurnState.COMPLETED,
        reason=None,
        began_at=NOW,
        seconds=3.0,
        waited_s=1.0,
        attempts=[replace(ATTEMPT, outcome=TurnState.FAILED, reason="engine_died"), ATTEMPT],
        trace_parent=PARENT,
    )
    recorder.spans.take_request(request)
    served = recorder.one("POST /v1/embeddings")
    assert (served.kind, served.parent and served.parent.span_id) == (SpanKind.SERVER, int("b7ad6b7169203331", 16))
    assert [span.parent and span.parent.span_id for span in recorder.named("embeddings m")] == [id_of(served)] * 2


def test_a_conversation_from_before_a_restart_has_a_span_from_its_next_turn_on() -> None:
    """A span that continues after the restart ends with this process."""
    recorder = Recorder()
    recorder.spans.record_facts([ended("a", 3)])
    recorder.spans.close()
    assert recorder.one("invoke_agent a").parent is not None
    assert recorder.one("invoke_workflow debate").start_time == int(NOW.timestamp()) * 1_000_000_000


def test_without_spans_no_tracing_is_imported() -> None:
    """The whole service is imported, without the SDK and the code that makes spans.

    The API alone comes with the MCP client.
    """
    code = "import sys, service.serve, service.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not re.findall(r"opentelemetry\.(?:sdk|exporter)\S*|service\.telemetry\.tracing\S*", done.stdout)
    assert "service.telemetry.telemetry" in done.stdout


async def test_without_the_extra_traces_are_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Switching spans on without them names what to install, and nothing starts."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "service.telemetry.span_maker", raising=False)
    attached = {"engine": "attached", "url": "http://127.0.0.1:9"}
    config = Config.model_validate(
        {"models": {"m": attached}, "store": {"url": "memory"}, "telemetry": {"traces": True}}
    )
    spec = WorkerSpec(engine=EngineKind.ATTACHED, name="m", url="http://127.0.0.1:9")
    with pytest.raises(ExceptionGroup) as refused:
        async with open_node(config, [spec], tmp_path):
            raise AssertionError("it starts")
    assert "pip install 'roundhouse-llm[otel]'" in repr(refused.value.subgroup(ConfigError))
