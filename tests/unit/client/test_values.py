"""The client's values against the service's schemas, and answers of other versions."""

import pickle
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from roundhouse_client.decoding import decode, parse
from roundhouse_client.errors import AnswerMalformed
from roundhouse_client.values import jobs, workers
from tests.unit.client.answers import JOB, LINE
from tools.job_types import PAGE, generated


def test_a_copy_keeps_what_came() -> None:
    """Values are sent to other processes, and copied."""
    job = decode(jobs.Job, {**JOB, "mood": "good"})
    for other in (pickle.loads(pickle.dumps(job)), deepcopy(job)):  # noqa: S301 - our own
        assert (other, other.document, other.progress.document) == (job, job.document, job.progress.document)
    made = replace(job, name="another")
    assert (made.name, hasattr(made, "document")) == ("another", False)  # it did not come so


def test_the_types_of_a_posted_job_are_those_that_the_service_reads() -> None:
    """``python tools/job_types.py`` writes them after a change."""
    assert PAGE.read_text(encoding="utf-8") == generated()


def test_a_job_is_read_with_its_types() -> None:
    """Times are times, nested objects are values."""
    job = decode(jobs.Job, JOB)
    assert job.created_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert (job.started_at, job.progress.turns.total, job.metadata) == (None, 2, {"mine": [1]})
    assert not job.has_ended


def test_a_field_of_a_newer_service_is_ignored_and_kept() -> None:
    """Unknown fields never break an older client; the caller can still read them."""
    newer = {**JOB, "mood": "good", "progress": {**JOB["progress"], "share": 0.5}}
    job = decode(jobs.Job, newer)
    assert job == decode(jobs.Job, JOB)
    assert (job.document["mood"], job.progress.document["share"]) == ("good", 0.5)


def test_a_state_of_a_newer_service_is_an_end() -> None:
    """States are words: all but those of a running job are ends."""
    assert decode(jobs.Job, {**JOB, "state": "archived"}).has_ended


def without(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != name}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (without(JOB, "name"), "Job.name: missing"),
        ({**JOB, "name": 1}, "Job.name: of another type"),
        ({**JOB, "created_at": "soon"}, "Job.created_at: not a time"),
        ({**JOB, "metadata": []}, "Job.metadata: not an object"),
        ({**JOB, "progress": {**JOB["progress"], "turns": 3}}, "Job.progress.turns: not an object"),
        ({**JOB, "is_metadata_cut": 1}, "Job.is_metadata_cut: of another type"),
        ([], "Job: not an object"),
    ],
)
def test_an_unusable_answer_names_its_place(document: object, told: str) -> None:
    """One error is raised when the answer arrives, not a KeyError in the caller's code."""
    with pytest.raises(AnswerMalformed, match=f"^{told}$"):
        decode(jobs.Job, document)


def test_places_in_lists_are_named() -> None:
    """By number; and a boolean is no number."""
    with pytest.raises(AnswerMalformed, match=r"^WorkerLog.lines\[1\].number: of another type$"):
        log = {"id": "m-0", "incarnation": 1, "lines": [LINE, {**LINE, "number": True}]}
        decode(workers.WorkerLog, log)


def test_an_optional_field_may_be_missing() -> None:
    """An older service does not send it."""
    assert decode(jobs.Job, without(JOB, "finished_at")).finished_at is None


def test_an_answer_that_is_not_json_is_refused() -> None:
    """For example a proxy's page."""
    with pytest.raises(AnswerMalformed, match="not JSON: b'<html>'"):
        parse(b"<html>")
