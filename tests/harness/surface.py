"""What comes over HTTP: problems in their form, and the events of a job."""

import json
from typing import Any

import httpx
from httpx_sse import connect_sse

from tests.harness.service import Document, Service


def problem(answer: httpx.Response, status: int, code: str) -> Document:
    assert answer.headers["content-type"] == "application/problem+json"
    document: Document = answer.json()
    assert set(document) == {"type", "title", "status", "detail", "code", "errors"}
    assert (answer.status_code, document["status"], document["code"]) == (status, status, code), answer.text
    return document


def read_events(service: Service, job_id: str, last: str = "", count: int | None = None) -> list[tuple[str, str, Any]]:
    headers = {"Last-Event-ID": last} if last else {}
    events: list[tuple[str, str, Any]] = []
    with connect_sse(service.http, "GET", f"/v1/jobs/{job_id}/events", headers=headers) as source:
        assert source.response.headers["content-type"].startswith("text/event-stream")
        for event in source.iter_sse():
            events.append((event.id, event.event, json.loads(event.data)))
            if len(events) == count:
                break
    return events
