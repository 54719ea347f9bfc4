"""Spans of a service, sent over OTLP/HTTP to a receiver that follows the protocol."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.harness.service import debate, scripted_model, serving
from tests.harness.waiting import wait_for

TRACE, POSTER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{POSTER}-01"}


class Receiver(ThreadingHTTPServer):
    """Accepts what is posted, and answers as a collector does."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, ExportTraceServiceRequest]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def spans(self) -> list[Span]:
        """All spans so far."""
        return [
            span
            for _, request in list(self.taken)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver for a block."""
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


@pytest.mark.system
def test_a_job_and_a_request_arrive_as_their_clients_traces(
    tmp_path: Path, free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard variables give the address; remaining spans are sent as the service stops."""
    port = free_ports(2)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        models = {"m": scripted_model(port + 1, tokens=200)}
        with serving(tmp_path, port, models, telemetry={"traces": True}) as service:
            service.wait_ended(service.post_job(debate(conversations=2, rounds=2), **PARENT))
            chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert service.http.post("/v1/chat/completions", json=chat, headers=PARENT).status_code == 200
            wait_for(lambda: len(receiver.spans) >= 27, "the spans have come while the service runs")
            service.post_job(debate(name="last"))
        spans = receiver.spans
    ours = [span for span in spans if span.trace_id.hex() == TRACE]
    # A span for a conversation, a turn and its attempt; the client's request and its attempt. None for any token.
    assert sorted(span.name for span in ours) == sorted(
        ["invoke_workflow debate"] * 2
        + [f"invoke_agent {agent}" for agent in "abm"] * 4
        + ["chat m"] * 13
        + ["POST /v1/chat/completions"]
    )
    roots = {span.name for span in ours if span.parent_span_id.hex() == POSTER}
    assert roots == {"invoke_workflow debate", "POST /v1/chat/completions"}
    known = {span.span_id for span in ours}
    assert all(span.parent_span_id in known for span in ours if span.name not in roots)
    assert "invoke_workflow last" in {span.name for span in spans if span.trace_id.hex() != TRACE}
    (path,) = {path for path, _ in receiver.taken}
    resource = receiver.taken[0][1].resource_spans[0].resource
    about = {each.key: each.value.string_value for each in resource.attributes}
    assert (path, about["service.name"]) == ("/v1/traces", "roundhouse")
