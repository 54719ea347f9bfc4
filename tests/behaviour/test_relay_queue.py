"""Requests at the front door wait in one queue with the turns of jobs (specification, "Front door")."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

HOLD = r"HOLD:([^ \"]+)"


class Caller(threading.Thread):
    """A client on a thread of its own, which keeps its answer."""

    def __init__(self, service: Service, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> None:  # noqa: ANN401 - of a JSON body
        super().__init__()
        self._url = service.url
        self._body = {"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}
        self._headers = headers or {}
        self.status = 0
        self.told: httpx.Headers = httpx.Headers()
        self.text = ""
        self.start()

    def run(self) -> None:
        """Ask, and read data as it arrives."""
        with (
            httpx.Client(base_url=self._url, timeout=LIMIT_S, trust_env=False) as http,
            http.stream("POST", "/v1/chat/completions", json=self._body, headers=self._headers) as answer,
        ):
            self.status, self.told = answer.status_code, answer.headers
            for piece in answer.iter_text():
                self.text += piece


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("queue")
    model = scripted_model(
        free_ports(1), slots=1, record=str(folder / "record.jsonl"), hold=HOLD, echo="SAY:(.*)", counts=11
    )
    wide = scripted_model(free_ports(1), slots=2, hold=HOLD)
    server = {"heartbeat_s": 0.2, "queue": 4}
    with serving(folder, free_ports(1), {"m": model, "wide": wide}, server) as running:
        yield running


def in_use(service: Service, model: str = "m") -> int:
    slots: Document = service.get(f"/v1/workers/{model}-0")["slots"]
    return int(slots["in_use"])


def waiting(service: Service) -> int:
    return int(service.get("/v1/status")["pools"]["ready"])


@contextmanager
def held(service: Service, tmp_path: Path, model: str = "m", **fields: int) -> Iterator[Caller]:
    """Hold slots of a model for a block, with a request that its engine answers once a file exists."""
    gate = tmp_path / f"gate-{model}"
    caller = Caller(service, f"HOLD:{gate} SAY:held", None, model=model, stream=True, **fields)
    try:
        wait_for(lambda: in_use(service, model), "its slot is taken")
        yield caller
    finally:
        gate.touch()
        caller.join(LIMIT_S)


def said(file: Path) -> list[str]:
    return [str(request["messages"][-1]["content"]) for request in recorded(file)]


def test_requests_and_turns_share_one_queue_by_priority(service: Service, tmp_path: Path) -> None:
    """The largest priority goes first, for requests and turns alike."""
    job: Document = {"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "SAY:job-5"}], "priority": 5}
    with held(service, tmp_path):
        low = Caller(service, "SAY:low")
        wait_for(lambda: waiting(service) == 1, "one waits")
        job_id = service.post_job(job)
        high = Caller(service, "SAY:high", {"X-Roundhouse-Priority": "9"})
        wait_for(lambda: waiting(service) == 3, "all wait")
        status = service.get("/v1/status")
        assert status["jobs"] == 1
        assert {head["name"] for head in status["heads"]["ready"]} == {"job", "/v1/chat/completions"}
    for caller in (low, high):
        caller.join(LIMIT_S)
        assert caller.status == 200
    assert service.wait_ended(job_id)["state"] == "completed"
    order = [text for text in said(service.folder / "record.jsonl") if text in ("SAY:low", "SAY:job-5", "SAY:high")]
    assert order == ["SAY:high", "SAY:job-5", "SAY:low"]
    assert int(low.told["x-roundhouse-wait-ms"]) > 0
    assert service.get("/v1/status")["jobs"] == 0


def test_a_waiting_stream_gets_comments(service: Service, tmp_path: Path) -> None:
    """After heartbeat_s the headers go out, then comments; the information of later headers comes as a comment."""
    with held(service, tmp_path):
        caller = Caller(service, "SAY:later", stream=True)
        wait_for(lambda: caller.text.count(": waiting\n\n") >= 2, "it hears comments")
        assert caller.status == 200
        assert "x-roundhouse-worker" not in caller.told
        second = Caller(service, "SAY:last", stream=True)
        first = Caller(service, "SAY:first", stream=True, headers={"X-Roundhouse-Priority": "1"})
        wait_for(lambda: ": place 1 in the queue\n\n" in first.text, "a higher priority comes first")
        wait_for(lambda: ": place 3 in the queue\n\n" in second.text, "who came last is last")
        wait_for(lambda: ": place 2 in the queue\n\n" in caller.text, "and its own place changes")
    for each in (caller, first, second):
        each.join(LIMIT_S)
    comments = [line for line in caller.text.splitlines() if line.startswith(":")]
    assert comments[-1].startswith(": roundhouse worker=m-0 wait_ms=")
    assert comments[-1].endswith("attempts=1")
    assert caller.text.endswith("data: [DONE]\n\n")
    assert "later" in caller.text


def test_a_full_queue_refuses(service: Service, tmp_path: Path) -> None:
    """429 with Retry-After once server.queue requests wait; jobs are not counted."""
    with held(service, tmp_path):
        callers = [Caller(service, f"SAY:{number}") for number in range(4)]
        wait_for(lambda: waiting(service) == 4, "four wait")
        refused = service.http.post("/v1/chat/completions", json={"model": "m", "messages": []})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    for caller in callers:
        caller.join(LIMIT_S)
        assert caller.status == 200


def test_a_wait_has_its_own_limit(service: Service, tmp_path: Path) -> None:
    """X-Roundhouse-Wait-S bounds the queue alone: 503 with Retry-After, or an error event in a stream."""
    with held(service, tmp_path):
        headers = {"X-Roundhouse-Wait-S": "0.3"}
        whole, stream = Caller(service, "SAY:x", headers), Caller(service, "SAY:y", headers, stream=True)
        for caller in (whole, stream):
            caller.join(LIMIT_S)
        assert (whole.status, json.loads(whole.text)["error"]["code"]) == (503, "queue_timeout")
        assert whole.told["retry-after"] == "5"
        assert stream.status == 200
        (event,) = [line for line in stream.text.splitlines() if line.startswith("data: ")]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "queue_timeout"
        wait_for(lambda: waiting(service) == 0, "nothing of it waits")


def test_a_deadline_counts_only_time_on_the_slot(service: Service, tmp_path: Path) -> None:
    """X-Roundhouse-Deadline-S starts with the slot: a request that waits longer is still answered."""
    with held(service, tmp_path):
        patient = Caller(service, "SAY:patient", {"X-Roundhouse-Deadline-S": "2"})
        wait_for(lambda: waiting(service) == 1, "it waits")
        cut = Caller(service, f"HOLD:{tmp_path / 'never'}", {"X-Roundhouse-Deadline-S": "0.2"}, model="wide")
        cut.join(LIMIT_S)
        assert (cut.status, json.loads(cut.text)["error"]["code"]) == (504, "deadline")
        assert cut.told["x-should-retry"] == "false"
        wait_for(lambda: in_use(service, "wide") == 0, "its slot is free")
    patient.join(LIMIT_S)
    assert patient.status == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_disconnects_frees_its_slot(service: Service, tmp_path: Path, *, is_streamed: bool) -> None:
    """At once, whether its request is on a slot or in the queue."""
    never = tmp_path / "never"
    body = {"model": "m", "stream": is_streamed, "messages": [{"role": "user", "content": f"HOLD:{never}"}]}
    with httpx.Client(base_url=service.url, trust_env=False) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, timeout=0.1)
    wait_for(lambda: in_use(service) == 0, "its slot is free", 2.0)
    with held(service, tmp_path):
        with httpx.Client(base_url=service.url, trust_env=False) as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=body, timeout=0.1)
        wait_for(lambda: waiting(service) == 0, "nothing waits", 2.0)


def test_several_answers_take_as_many_slots(service: Service, tmp_path: Path) -> None:
    """N above 1 takes n slots, as the engine does; one more request waits for them."""
    with held(service, tmp_path, "wide", n=2):
        assert in_use(service, "wide") == 2
        other = Caller(service, "SAY:other", model="wide")
        wait_for(lambda: waiting(service) == 1, "it waits")
    other.join(LIMIT_S)
    assert other.status == 200
    (tmp_path / "gate-wide").unlink()
    with held(service, tmp_path, "wide"):
        pair = Caller(service, "SAY:pair", model="wide", n=2)
        wait_for(lambda: waiting(service) == 1, "one free slot is not enough for it")
        assert in_use(service, "wide") == 1
    pair.join(LIMIT_S)
    assert pair.status == 200


def test_more_answers_than_slots_take_all_slots(service: Service, tmp_path: Path) -> None:
    """The engine decides whether it makes that many."""
    with held(service, tmp_path, "wide", n=5):
        assert in_use(service, "wide") == 2


def test_a_stopping_service_refuses_waiting_requests(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """They get an error that asks for a retry; running ones are drained."""
    gate = tmp_path / "gate"
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1), slots=1, hold=HOLD)}) as service:
        runs = Caller(service, f"HOLD:{gate}", stream=True)
        wait_for(lambda: in_use(service) == 1, "its slot is taken")
        waits = Caller(service, "later")
        wait_for(lambda: waiting(service) == 1, "it waits")
        assert service.process is not None
        service.process.terminate()
        waits.join(LIMIT_S)
        assert (waits.status, json.loads(waits.text)["error"]["code"]) == (503, "shutdown")
        gate.touch()
        runs.join(LIMIT_S)
        assert runs.text.endswith("data: [DONE]\n\n")
        assert service.process.wait(LIMIT_S) == 0


COUNT = "/v1/chat/completions/input_tokens"


def test_tokens_are_counted_without_a_slot(service: Service, tmp_path: Path) -> None:
    """The only slot is in use and others wait for it: an engine counts beside its slots."""
    with held(service, tmp_path):
        behind = Caller(service, "SAY:behind")
        wait_for(lambda: waiting(service) == 1, "one waits")
        counted = service.http.post(COUNT, json={"model": "m", "messages": []})
        assert (counted.status_code, counted.json()) == (200, {"input_tokens": 11})
        assert (counted.headers["x-roundhouse-worker"], counted.headers["x-roundhouse-attempts"]) == ("m-0", "1")
        assert (in_use(service), waiting(service)) == (1, 1)
        unknown = service.http.post("/tokenize", json={"model": "m", "content": "a"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    behind.join(LIMIT_S)


def test_a_count_waits_for_a_ready_worker(service: Service) -> None:
    """As any other request does."""
    assert service.http.post("/v1/workers/m-0/drain").status_code == 202
    wait_for(lambda: service.get("/v1/workers/m-0")["state"] == "draining", "it takes nothing")
    answers: list[httpx.Response] = []
    counting = threading.Thread(
        target=lambda: answers.append(service.http.post(COUNT, json={"model": "m", "messages": []}))
    )
    counting.start()
    wait_for(lambda: waiting(service) == 1, "it waits")
    assert service.http.post("/v1/workers/m-0/resume").status_code == 202
    counting.join(LIMIT_S)
    assert [answer.json() for answer in answers] == [{"input_tokens": 11}]


def test_another_worker_counts_if_one_cannot(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A busy worker's refusal is not final; an engine's own refusal is passed on."""
    once = tmp_path / "refused"
    first = scripted_model(free_ports(2), replicas=2, counts=5, count_busy=str(once))
    odd = scripted_model(free_ports(1), count_status=500)
    with serving(tmp_path, free_ports(1), {"m": first, "odd": odd}) as service:
        counted = service.http.post(COUNT, json={"model": "m", "messages": []})
        assert (counted.status_code, counted.headers["x-roundhouse-attempts"]) == (200, "2"), counted.text
        assert once.exists()
        refused = service.http.post(COUNT, json={"model": "odd", "messages": []})
        assert (refused.status_code, refused.headers["x-roundhouse-attempts"]) == (500, "1")
        assert {worker["state"] for worker in service.get("/v1/workers")["workers"]} == {"ready"}
