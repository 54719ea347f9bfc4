"""The command line follows a job through passing failures."""

import json

import httpx
import pytest

from roundhouse_client import Client
from roundhouse_client.flows import following
from service.cli.commands.remote import follow

AT = "2026-01-31T12:00:00.000000Z"
END = f"event: end\nid: 1\ndata: {json.dumps({'state': 'completed', 'at': AT})}\n\n"
CONVERSATIONS = dict.fromkeys(("total", "completed", "failed", "cancelled"), 0)
TURNS = CONVERSATIONS | dict.fromkeys(("pending", "ready", "in_flight"), 0)
JOB = {
    "id": "job-1",
    "name": "j",
    "state": "running",
    "created_at": AT,
    "progress": {"conversations": CONVERSATIONS, "turns": TURNS},
    "metadata": {},
    "is_metadata_cut": False,
}


def test_a_service_without_room_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 passes: connections become free, and a store comes back."""
    monkeypatch.setattr(following, "RECONNECT_S", 0.0)
    answers = iter(
        [
            httpx.Response(200, json=JOB),
            httpx.Response(503, json={"detail": "64 connections are open; try again"}),
            httpx.Response(503, json={"detail": "64 connections are open; try again"}),
            httpx.Response(200, json=JOB),
            httpx.Response(200, text=END, headers={"Content-Type": "text/event-stream"}),
        ]
    )
    with httpx.Client(transport=httpx.MockTransport(lambda _: next(answers))) as http:
        assert follow(Client("http://test", http=http), "job-1", lambda _event: None) == "completed"
