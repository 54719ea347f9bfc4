"""The HTTP surface, promise by promise (specification, "HTTP interface")."""

import csv
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from httpx_sse import connect_sse

from roundhouse_client.decoding import decode
from roundhouse_client.values.jobs import Job, JobPage
from roundhouse_client.values.transcripts import Result
from tests.harness.service import Document, Service, check_debate, debate, recorded, scripted_model, serving
from tests.harness.surface import problem, read_events
from tests.harness.waiting import LIMIT_S, wait_for


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("http")
    flags = {"record": str(folder / "record.jsonl"), "echo": r"You are (MARK-\w+)\.", "interval": 0.002}
    models = {
        "m": scripted_model(free_ports(2), replicas=2, slots=2, **flags),
        "slow": scripted_model(free_ports(1), tokens=100_000, interval=0.01),
    }
    with serving(folder, free_ports(1), models) as running:
        yield running


def test_a_job_is_accepted_run_and_read(service: Service) -> None:
    """What a user does first: post a conversation, read the transcript."""
    answer = service.http.post("/v1/jobs", json=debate(conversations=3, rounds=2, metadata={"mine": [1]}))
    assert answer.status_code == 202
    posted = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{posted['id']}"
    assert (posted["name"], posted["metadata"], posted["progress"]["turns"]["total"]) == ("debate", {"mine": [1]}, 18)
    job = service.wait_ended(posted["id"])
    assert job["state"] == "completed"
    assert job["progress"]["conversations"] == {"total": 3, "completed": 3, "failed": 0, "cancelled": 0}
    counts = {"pending": 0, "ready": 0, "in_flight": 0, "awaited": 0, "completed": 18, "failed": 0, "cancelled": 0}
    assert job["progress"]["turns"] == {"total": 18, **counts}
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]
    result = service.get(f"/v1/jobs/{posted['id']}/result")
    assert [talk["id"] for talk in result["conversations"]] == ["q0", "q1", "q2"]
    for kind, told in ((Job, job), (Result, result), (JobPage, service.get("/v1/jobs"))):
        assert json.loads(msgspec.json.encode(decode(kind, told))) == told, "a field that no value has"
    for transcript in result["conversations"]:
        check_debate(transcript, rounds=2)
        assert service.get(f"/v1/jobs/{posted['id']}/conversations/{transcript['id']}") == transcript
    turn = result["conversations"][0]["turns"][0]
    assert turn["worker"] in ("m-0", "m-1")
    assert turn["usage"] == {"prompt_tokens": 7, "completion_tokens": 1, "cached_tokens": 0}
    assert turn["queued_at"] <= turn["started_at"] <= turn["first_token_at"] <= turn["finished_at"]
    assert [attempt["outcome"] for attempt in turn["attempts"]] == ["completed"]
    lines = service.http.get(f"/v1/jobs/{posted['id']}/result?format=jsonl").text.splitlines()
    assert [json.loads(line) for line in lines] == result["conversations"]


def test_no_agent_reads_hidden_words(service: Service) -> None:
    """``visible_to``, ``speak_after_within_round`` and independent conversations hold in every prompt that was sent."""
    job = debate(conversations=4, rounds=3)
    for agent, mark in zip(job["agents"], "xyz", strict=True):
        agent["system"] = f"You are MARK-{mark}."
    job["agents"][0]["visible_to"] = ["b"]
    job["agents"][1]["visible_to"] = []
    for talk in job["conversations"]:
        talk["prompt"] = f"TOPIC-secret{talk['id']}."
    service.wait_ended(service.post_job(job))
    requests = [json.dumps(entry["messages"]) for entry in recorded(service.folder / "record.jsonl")]
    ours = [text for text in requests if "TOPIC-secretq" in text]
    assert len(ours) == 4 * 9
    for text in ours:
        assert sum(f"TOPIC-secretq{number}" in text for number in range(4)) == 1
        speaker = next(mark for mark in "xyz" if f"You are MARK-{mark}." in text)
        if speaker == "x":
            assert "MARK-y" not in text
            assert ("MARK-z" in text) == ("1 of 3" not in text.rsplit("(Round", 1)[1])
        elif speaker == "y":
            assert ("MARK-x" in text) == ("1 of 3" not in text.rsplit("(Round", 1)[1])
        else:  # the moderator hears both in its round, and nothing of theirs from earlier ones
            assert text.count("a: ") == 1
            assert text.count("b: ") == 1


def test_the_parts_of_a_prompt_are_in_order(service: Service) -> None:
    """BIOS, the agent's own system prompt, the conversation's prompt, the discussion.

    Source: specification, "Message order" and "Prompt composition".
    """
    job = {
        "agents": [{"id": "solo", "model": "m", "system": "You are MARK-solo."}],
        "conversations": [{"prompt": "TOPIC-solo"}],
    }
    job["rounds"] = 2  # type: ignore[assignment]
    service.wait_ended(service.post_job({**job, "name": "order"}))
    first, second = [entry for entry in recorded(service.folder / "record.jsonl") if "MARK-solo" in json.dumps(entry)]
    system, said = first["messages"]
    assert system["role"] == "system"
    assert system["content"].startswith("Now: ")
    assert system["content"].endswith("\n\nYou are MARK-solo.")
    assert said == {"role": "user", "content": "TOPIC-solo"}
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][1] == said
    assert second["messages"][2]["content"] == "MARK-solo "


def test_the_same_idempotency_key_is_the_same_job(service: Service) -> None:
    """Idempotency-Key: the same body returns the existing job, another body is a conflict."""
    first = service.http.post("/v1/jobs", json=debate(), headers={"Idempotency-Key": "k1"})
    headers = {"Idempotency-Key": "k1", "Content-Type": "application/json"}
    again = service.http.post("/v1/jobs", content=json.dumps(debate(), indent=3), headers=headers)
    other = service.http.post("/v1/jobs", json=debate(rounds=2), headers={"Idempotency-Key": "k1"})
    assert (first.status_code, again.status_code, again.json()["id"]) == (202, 200, first.json()["id"])
    problem(other, 409, "idempotency_conflict")
    problem(
        service.http.post("/v1/jobs", json=debate(), headers={"Idempotency-Key": "x" * 256}), 400, "invalid_parameter"
    )


@pytest.mark.parametrize(
    ("body", "status", "code", "text"),
    [
        (b"nonsense", 400, "body_malformed", "not usable JSON"),
        (b"", 400, "body_malformed", "not usable JSON"),
        (b'{"a": "\xff"}', 400, "body_malformed", "not usable JSON"),
        (b"[" * 100_000, 400, "body_malformed", "not usable JSON"),
        (b"[" * 100 + b"]" * 100, 400, "body_malformed", "limits.depth = 64"),
        (b"x" * (17 << 20), 413, "body_too_large", "limits.body_bytes"),
        (b"5", 422, "invalid_job", "a job is an object"),
        (b"{}", 422, "invalid_job", "agents: is required"),
    ],
    ids=["no JSON", "empty", "no UTF-8", "bottomless", "too deep", "too large", "a number", "an empty object"],
)
def test_a_bad_body_is_refused(service: Service, body: bytes, status: int, code: str, text: str) -> None:
    """Bad input gets a clear error and affects nothing else."""
    answer = service.http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert text in problem(answer, status, code)["detail"]


def test_every_fault_is_listed_by_its_path(service: Service) -> None:
    """A job is refused whole, with every fault at once."""
    job = {
        "agents": [
            {"id": "a", "model": "n", "visible_to": ["z"], "speak_after_within_round": ["b"]},
            {"id": "b", "model": "m", "speak_after_within_round": ["a"]},
            {"id": "a", "model": "m"},
        ],
        "conversations": [{"id": "q", "prompt": ""}, {"id": "q", "prompt": ""}],
    }
    document = problem(service.http.post("/v1/jobs", json=job), 422, "invalid_job")
    told = {error["path"]: error["message"] for error in document["errors"]}
    assert told["agents[0].model"] == "unknown model 'n'; known: m, slow"
    assert told["agents[0].visible_to[0]"] == "unknown agent 'z'; known: a, b"
    assert "a waits for b waits for a" in told["agents[0].speak_after_within_round"]
    assert told["agents[2].id"] == "'a' is the id of agents[0] already"
    assert told["conversations[1].id"] == "'q' is the id of conversations[0] already"
    unknown = {**debate(), "agnets": []}
    assert problem(service.http.post("/v1/jobs", json=unknown), 422, "invalid_job")["errors"] == [
        {"path": "agnets", "message": "unknown key 'agnets'; did you mean 'agents'?"}
    ]


@pytest.mark.parametrize(
    "path", ["/v1/jobs/none", "/v1/jobs/none/result", "/v1/jobs/none/events", "/v1/jobs/none/conversations/c0"]
)
def test_an_unknown_job_is_404(service: Service, path: str) -> None:
    """Every path answers an unknown id the same way."""
    problem(service.http.get(path), 404, "job_not_found")


def test_unknown_things_of_other_kinds_are_404(service: Service) -> None:
    """A conversation, a worker, a path, a method."""
    job_id = service.post_job(debate())
    problem(service.http.get(f"/v1/jobs/{job_id}/conversations/none"), 404, "conversation_not_found")
    problem(service.http.get("/v1/workers/none"), 404, "worker_not_found")
    problem(service.http.get("/v1/workers/none/logs"), 404, "worker_not_found")
    problem(service.http.get("/nowhere"), 404, "not_found")
    problem(service.http.put("/v1/jobs"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "state=odd", "cursor=x", "cursor=-1", f"cursor={'9' * 30}", "limit=1001"]
)
def test_a_bad_parameter_is_400(service: Service, query: str) -> None:
    """Parameters are checked like bodies."""
    problem(service.http.get(f"/v1/jobs?{query}"), 400, "invalid_parameter")


def test_a_bad_parameter_is_named_with_its_allowed_values(service: Service) -> None:
    """The wording is that of faults in a configuration or a job."""
    told = problem(service.http.get("/v1/jobs?limit=0"), 400, "invalid_parameter")
    assert told["errors"] == [{"path": "query.limit", "message": "must be at least 1, not '0'"}]


def test_jobs_are_listed_newest_first_in_pages(service: Service) -> None:
    """Each job appears once over all pages."""
    posted = [service.post_job(debate()) for _ in range(5)]
    for job_id in posted:
        service.wait_ended(job_id)
    seen: list[str] = []
    cursor = ""
    while True:
        page = service.get(f"/v1/jobs?state=completed&limit=2{cursor}")
        seen += [job["id"] for job in page["jobs"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen[:5] == posted[::-1]
    assert len(seen) == len(set(seen))


def test_a_running_job_shows_its_partial_text_and_has_no_result(service: Service) -> None:
    """The transcript so far has the text of turns in flight."""
    job_id = service.post_job(debate(model="slow"))
    shown: list[Document] = []

    def has_text() -> bool:
        shown[:] = service.get(f"/v1/jobs/{job_id}/conversations/q0")["turns"]
        return len(shown) == 2 and all(turn["text"] for turn in shown)

    wait_for(has_text, "both participants have said something")
    assert {turn["state"] for turn in shown} == {"in_flight"}
    answer = service.http.get(f"/v1/jobs/{job_id}/result")
    problem(answer, 409, "not_finished")
    assert answer.headers["retry-after"] == "1"
    problem(service.http.delete(f"/v1/jobs/{job_id}"), 409, "not_ended")
    assert service.get("/v1/workers/slow-0")["slots"] == {"total": 2, "in_use": 2, "held": 0}
    assert service.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    assert service.wait_ended(job_id)["state"] == "cancelled"
    transcript = service.get(f"/v1/jobs/{job_id}/conversations/q0")
    assert (transcript["state"], transcript["reason"]) == ("cancelled", "cancelled")
    states = [(turn["agent"], turn["state"], turn["reason"], bool(turn["text"])) for turn in transcript["turns"]]
    assert sorted(states) == [
        ("a", "cancelled", "cancelled", True),
        ("b", "cancelled", "cancelled", True),
        ("m", "cancelled", "cancelled", False),
    ]
    wait_for(lambda: service.get("/v1/workers/slow-0")["slots"]["in_use"] == 0, "the slots are free")


def test_a_deleted_job_is_gone(service: Service) -> None:
    """DELETE removes all stored data; later look-ups are 404."""
    job_id = service.post_job(debate())
    service.wait_ended(job_id)
    assert service.http.delete(f"/v1/jobs/{job_id}").status_code == 204
    problem(service.http.get(f"/v1/jobs/{job_id}"), 404, "job_not_found")
    problem(service.http.delete(f"/v1/jobs/{job_id}"), 404, "job_not_found")


def test_a_job_that_must_not_wait_is_refused_if_it_would(service: Service) -> None:
    """With queue=false the answer is 429 and nothing is stored, unless every first turn can start at once."""
    wait_for(lambda: service.get("/v1/workers/slow-0")["slots"]["in_use"] == 0, "the slots are free")
    count = len(service.get("/v1/jobs?limit=1000")["jobs"])
    answer = service.http.post("/v1/jobs?queue=false", json=debate(conversations=2, model="slow"))
    problem(answer, 429, "no_slot_available")
    assert answer.headers["retry-after"] == "1"
    answers: list[httpx.Response] = []
    posts = [
        threading.Thread(
            target=lambda: answers.append(service.http.post("/v1/jobs?queue=false", json=debate(model="slow")))
        )
        for _ in range(4)
    ]
    for post in posts:
        post.start()
    for post in posts:
        post.join(LIMIT_S)
    assert sorted(answer.status_code for answer in answers) == [202, 429, 429, 429]
    assert len(service.get("/v1/jobs?limit=1000")["jobs"]) == count + 1
    accepted = next(answer.json()["id"] for answer in answers if answer.status_code == 202)
    service.http.post(f"/v1/jobs/{accepted}/cancel")
    service.wait_ended(accepted)


def test_events_cover_a_job_from_its_start_to_its_end(service: Service) -> None:
    """Events of job, conversations, turns and end are numbered without a gap."""
    job_id = service.post_job(debate())
    events = [event for event in read_events(service, job_id) if event[1] != "progress"]
    assert [number for number, _, _ in events] == [str(number + 1) for number in range(len(events))]
    assert [(kind, data["state"]) for _, kind, data in events if kind != "turn"] == [
        ("job", "queued"),
        ("job", "running"),
        ("conversation", "running"),
        ("conversation", "completed"),
        ("end", "completed"),
    ]
    for agent in "abm":
        states = [data["state"] for _, kind, data in events if kind == "turn" and data["agent"] == agent]
        assert states == ["ready", "in_flight", "completed"]


def test_events_continue_after_the_last_one_read(service: Service) -> None:
    """Last-Event-ID: no event is missing or doubled, also after the job has ended."""
    job_id = service.post_job(debate(rounds=2))
    service.wait_ended(job_id)
    whole = read_events(service, job_id)
    for cut in range(1, len(whole)):
        assert read_events(service, job_id, last=whole[cut - 1][0]) == whole[cut:]
    assert read_events(service, job_id, last=whole[-1][0]) == []
    for bad in ("x", "-1", "9" * 5000):
        problem(service.http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": bad}), 400, "invalid_parameter")


def test_progress_of_turns_in_flight_is_coalesced(service: Service) -> None:
    """A watcher sees tokens grow, without an event for each of them and without a number."""
    job_id = service.post_job(debate(model="slow"))
    with connect_sse(service.http, "GET", f"/v1/jobs/{job_id}/events") as source:
        last, tokens = "", []
        for event in source.iter_sse():
            if event.event != "progress":
                last = event.id
                continue
            assert event.id == last  # it has none of its own, so the last numbered one's stands
            tokens.append(sum(turn["output_tokens"] for turn in json.loads(event.data)["turns"]))
            if tokens[-1] > 100:
                break
    assert tokens == sorted(tokens)
    assert len(tokens) < 20
    service.http.post(f"/v1/jobs/{job_id}/cancel")
    service.wait_ended(job_id)


def test_workers_and_their_logs_are_shown(service: Service) -> None:
    """GET /v1/workers and the last lines of an engine's output."""
    workers = service.get("/v1/workers")["workers"]
    assert [worker["id"] for worker in workers] == ["m-0", "m-1", "slow-0"]
    worker = service.get("/v1/workers/m-0")
    assert (worker["state"], worker["incarnation"], worker["restarts"], worker["last_exit"]) == ("ready", 1, 0, None)
    assert worker["pid"] == worker["pgid"]
    promised = (
        "id model engine state pid pgid port incarnation restarts slots last_exit verdict tokens_per_s weight_version"
    )
    assert set(promised.split()) <= set(worker)
    lines = service.get("/v1/workers/m-0/logs?tail=5")["lines"]
    assert any("scripted engine: listening" in line["text"] for line in lines)
    assert service.get(f"/v1/workers/m-0/logs?after={lines[-1]['number']}")["lines"] == []
    assert len(service.get("/v1/workers/m-0/logs?tail=1")["lines"]) == 1


@pytest.mark.system
def test_every_path_but_the_public_ones_needs_a_key(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """With api_keys set, only /healthz, the dashboard's files and a bare /readyz are exempt."""
    models = {"m": scripted_model(free_ports(1))}
    with serving(tmp_path, free_ports(1), models, {"api_keys": ["one", "two"]}) as service:
        del service.http.headers["Authorization"]
        assert service.http.get("/healthz").status_code == 200
        assert service.http.get("/readyz").json() == {"status": "ready", "without": []}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic one"}):
            for path in (
                "/v1/jobs",
                "/v1/overview/events",
                "/openapi.json",
                "/nowhere",
                "/web/nowhere",
                "/web/../v1/jobs",
            ):
                problem(httpx.get(service.url + path, headers=headers), 401, "not_authorised")
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{service.url}/v1/jobs", headers=headers).status_code == 200
        assert not {"one", "two", "wrong"} & set(re.findall(r"\w+", service.log()))


def test_health_may_be_asked_for_without_a_body(service: Service) -> None:
    """Some orchestrators probe with HEAD."""
    for path in ("/healthz", "/readyz"):
        answer = service.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_a_job_is_returned_as_it_was_posted(service: Service) -> None:
    """Whole, without conversations, or with those of one state: it can be posted again."""
    posted = debate(conversations=3)
    job_id = service.post_job(posted)
    service.wait_ended(job_id)
    path = f"/v1/jobs/{job_id}/document"
    assert service.get(path) == posted
    assert service.get(f"{path}?conversations=none") == {**posted, "conversations": []}
    assert service.get(f"{path}?conversations=completed") == posted
    assert service.get(f"{path}?conversations=failed")["conversations"] == []
    problem(service.http.get(f"{path}?conversations=nonsense"), 400, "invalid_parameter")
    problem(service.http.get("/v1/jobs/nope/document"), 404, "job_not_found")


def test_a_result_is_a_table(service: Service) -> None:
    """There is a row for each turn, with quotation marks and line ends as in CSV."""
    job_id = service.post_job({**debate(conversations=2), "name": 'a "b"'})
    service.wait_ended(job_id)
    answer = service.http.get(f"/v1/jobs/{job_id}/result?format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    turns = [
        (conversation["id"], turn["agent"], str(turn["round"]), turn["text"], str(turn["usage"]["completion_tokens"]))
        for conversation in service.get(f"/v1/jobs/{job_id}/result")["conversations"]
        for turn in conversation["turns"]
    ]
    assert [(r["conversation"], r["agent"], r["round"], r["text"], r["completion_tokens"]) for r in rows] == turns
    assert {(row["job"], row["state"]) for row in rows} == {(job_id, "completed")}


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        ("name: y\nagents: [{id: a, model: m}]\nconversations: [{prompt: 'Go: on'}]\n", 202, ""),
        ("agents: [\n", 400, "not YAML"),
        ("<<: {a: 1}\n", 400, "mappings are not merged"),
        ("a: &a [1]\nb: [*a, *a]\n", 400, "aliases and anchors are for files"),
        ("x" * 300_000, 400, "at most 262144 bytes; send it as JSON"),
        ("[" * 200, 400, ""),
    ],
)
def test_a_job_may_come_as_yaml(service: Service, text: str, status: int, told: str) -> None:
    """Job files are YAML. Its size is bounded, since reading it is slow."""
    answer = service.http.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"})
    assert (answer.status_code, told in answer.text) == (status, True), answer.text
