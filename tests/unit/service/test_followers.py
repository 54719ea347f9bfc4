"""Following a job from the command line, over what passes."""

import json

import httpx
import pytest

from service.cli import remote
from service.cli.remote import follow

END = f"event: end\nid: 1\ndata: {json.dumps({'state': 'completed', 'name': 'j'})}\n\n"


def test_a_service_that_has_no_room_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 passes: connections come free, a store comes back."""
    monkeypatch.setattr(remote, "RECONNECT_S", 0.0)
    answers = iter(
        [
            httpx.Response(200, json={"state": "running"}),
            httpx.Response(503, json={"detail": "64 connections are open; try again"}),
            httpx.Response(503, json={"detail": "64 connections are open; try again"}),
            httpx.Response(200, json={"state": "running"}),
            httpx.Response(200, text=END, headers={"Content-Type": "text/event-stream"}),
        ]
    )
    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(lambda _: next(answers))) as service:
        assert follow(service, "job-1", as_json=True) == "completed"
