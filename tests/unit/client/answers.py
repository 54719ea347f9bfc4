"""Documents as the service sends them."""

from typing import Any

AT = "2026-01-31T12:00:00.000000Z"
CONVERSATIONS: dict[str, Any] = {"total": 1, "completed": 0, "failed": 0, "cancelled": 0}
TURNS: dict[str, Any] = {**CONVERSATIONS, "total": 2, "pending": 1, "ready": 1, "in_flight": 0}
JOB: dict[str, Any] = {
    "id": "job-1",
    "name": "debate",
    "state": "running",
    "created_at": AT,
    "started_at": None,
    "finished_at": None,
    "progress": {"conversations": CONVERSATIONS, "turns": TURNS},
    "metadata": {"mine": [1]},
    "is_metadata_cut": False,
}
ENDED: dict[str, Any] = {**JOB, "state": "completed"}
LINE: dict[str, Any] = {"number": 1, "incarnation": 1, "stream": "stdout", "at": AT, "text": "listening"}


def transcript(name: str) -> dict[str, Any]:
    return {"id": name, "state": "completed", "reason": None, "metadata": {}, "turns": []}


def problem(status: int, code: str, **more: object) -> dict[str, object]:
    return {"title": "No", "status": status, "detail": "it cannot be", "code": code, "errors": [], **more}
