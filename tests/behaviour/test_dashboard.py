"""The dashboard's files, and frames that all viewers share."""

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from service.web.page_files import page_files
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

AGENTS = [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}]
KEYS = {name: f"{name}-{'k' * 24}" for name in ("alice", "bob", "root")}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    keys: list[Document] = [{"name": name, "key": KEYS[name]} for name in ("alice", "bob")]
    keys.append({"name": "root", "key": KEYS["root"], "scopes": ["admin"]})
    models = {"m": scripted_model(free_ports(1), slots=4), "dead": scripted_model(free_ports(1), exit_at_once=3)}
    folder = tmp_path_factory.mktemp("dashboard")
    with serving(folder, free_ports(1), models, {"keys": keys}, ready=False) as running:
        running.http.headers["Authorization"] = f"Bearer {KEYS['root']}"
        yield running


def frames(service: Service, path: str, name: str = "root", most: int = 1) -> list[tuple[str, Document]]:
    """Return the first events of a stream, each with its kind."""
    found: list[tuple[str, Document]] = []
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    with httpx.stream("GET", service.url + path, headers=headers, timeout=20) as answer:
        assert answer.status_code == 200, answer.read()
        kind = ""
        for line in answer.iter_lines():
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if line.startswith("data: "):
                found.append((kind, json.loads(line.removeprefix("data: "))))
            if len(found) == most:
                break
    return found


def test_the_page_and_its_files_need_no_key(service: Service) -> None:
    """They hold no one's data; each has its policy, and is sent again only after a change."""
    assert "/" in page_files()
    assert len(page_files()) > 15
    with httpx.Client(base_url=service.url) as stranger:
        for path, file in page_files().items():
            answer = stranger.get(path)
            assert (answer.status_code, answer.content) == (200, file.content)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert answer.headers["Cache-Control"] == "no-cache"
            again = stranger.get(path, headers={"If-None-Match": answer.headers["ETag"]})
            assert (again.status_code, again.content) == (304, b"")
            other = stranger.get(path, headers={"If-None-Match": '"another"'})
            assert other.status_code == 200
    assert service.http.get("/web/nowhere.js").status_code == 404


def test_the_page_contacts_only_its_own_service_and_writes_no_markup() -> None:
    """Every address in its files is its own, every named file exists, and text is never read as markup."""
    for path, file in page_files().items():
        text = file.content.decode()
        if path.startswith("/web/vendor/"):  # others' work, which makes tokens and no elements: markdown.js does that
            continue
        assert not set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            path
        )
        assert not re.search(r"\sstyle=|<style|\son\w+=", text), path
        names = re.findall(r'from "\./([\w.]+)"', text) + re.findall(r'(?:href|src)="/web/([\w.]+)"', text)
        assert {f"/web/{name}" for name in names} <= set(page_files()), path


def test_readiness_without_a_key_names_no_worker(service: Service) -> None:
    """A probe gets only the state; a key also gets the causes; a wrong key is reported."""
    bare = httpx.get(f"{service.url}/readyz")
    assert (bare.status_code, bare.json()["code"], bare.json()["errors"]) == (503, "not_ready", [])
    assert "dead" not in bare.text
    assert httpx.head(f"{service.url}/readyz").status_code == 503
    assert service.http.get("/readyz").json()["errors"][0]["path"] == "models.dead"
    for headers in ({"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        assert httpx.get(f"{service.url}/readyz", headers=headers).status_code == 401


def test_the_services_own_page_may_post(service: Service) -> None:
    """A browser sends the page's origin with its posts; another page's are refused, with a key or without."""
    job = {"agents": AGENTS, "conversations": [{"prompt": "Go."}]}
    assert service.http.post("/v1/jobs", json=job, headers={"Origin": service.url}).status_code == 202
    refused = service.http.post("/v1/jobs", json=job, headers={"Origin": "http://another.example"})
    assert (refused.status_code, refused.json()["code"]) == (403, "foreign_origin")
    bare = httpx.post(f"{service.url}/v1/jobs", json=job, headers={"Origin": service.url})
    assert bare.status_code == 401


def test_a_frame_shows_all_that_its_viewer_may_see(service: Service) -> None:
    """The newest jobs with their progress, and the status; each key sees only its own."""
    ids = {}
    for name in ("alice", "bob"):
        job = {"name": f"of-{name}", "agents": AGENTS, "conversations": [{"prompt": "Go."}]}
        answer = service.http.post("/v1/jobs", json=job, headers={"Authorization": f"Bearer {KEYS[name]}"})
        ids[name] = answer.json()["id"]
        service.wait_ended(ids[name])
    ((kind, seen),) = frames(service, "/v1/overview/events", "alice")
    assert kind == "frame"
    assert [job["id"] for job in seen["jobs"]] == [ids["alice"]]
    assert seen["jobs"][0] == service.get(f"/v1/jobs/{ids['alice']}")
    ((_, all_of_it),) = frames(service, "/v1/overview/events")
    assert [job["id"] for job in all_of_it["jobs"][:2]] == [ids["bob"], ids["alice"]]
    told, status = all_of_it["status"], service.get("/v1/status")
    assert told.keys() == status.keys()
    assert [worker["id"] for worker in told["workers"]] == [worker["id"] for worker in status["workers"]]
    headers = {"Authorization": f"Bearer {KEYS['bob']}"}
    hidden = httpx.get(f"{service.url}/v1/jobs/{ids['alice']}/overview/events", headers=headers)
    assert (hidden.status_code, hidden.json()["code"]) == (404, "job_not_found")


def test_a_jobs_conversations_come_in_pages(service: Service) -> None:
    """A hundred at a time, in the job's order, or those of one state; the stream of an ended job ends."""
    many = [{"id": f"c{number}", "prompt": "Go."} for number in range(120)]
    job_id = service.post_job({"name": "many", "agents": AGENTS, "conversations": many})
    service.wait_ended(job_id)
    path = f"/v1/jobs/{job_id}/overview/events"
    (_, first), (end, _) = frames(service, path, most=2)
    assert end == "end"
    page = first["page"]
    assert [line["id"] for line in page["lines"]] == [f"c{number}" for number in range(100)]
    assert (page["number"], page["pages"], page["found"]) == (1, 2, 120)
    line = page["lines"][0]
    assert (line["state"], line["turns"], line["prompt"], line["awaits"]) == ("completed", 2, "Go.", [])
    turns = service.get(f"/v1/jobs/{job_id}/conversations/c0")["turns"]
    assert line["tokens"] == sum(turn["usage"]["completion_tokens"] for turn in turns) > 0
    assert (line["agent"], line["words"]) == (turns[-1]["agent"], turns[-1]["text"].strip())
    began, ended = (datetime.fromisoformat(turns[at][word]) for at, word in ((0, "started_at"), (-1, "finished_at")))
    assert line["took_s"] == pytest.approx((ended - began).total_seconds(), abs=0.01)
    for number in (2, 9):  # one after the last is the last
        ((_, second),) = frames(service, f"{path}?page={number}")
        assert [line["id"] for line in second["page"]["lines"]] == [f"c{number}" for number in range(100, 120)]
    ((_, failed),) = frames(service, f"{path}?state=failed")
    assert (failed["page"]["lines"], failed["job"]["state"]) == ([], "completed")
    ((_, found),) = frames(service, f"{path}?text=c11&order=position&descending=true")
    ids = [line["id"] for line in found["page"]["lines"]]
    assert ids == [*(f"c{number}" for number in range(119, 109, -1)), "c11"]
    many_words = "%20".join(["c"] * 9)  # more than are looked for: none of them is left out in silence
    refused = service.http.get(f"{path}?text={many_words}")
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_parameter")
    assert service.http.get("/v1/jobs/gone/overview/events").status_code == 404


def test_a_transcript_can_be_read_from_a_turn_on(service: Service) -> None:
    """A viewer that has the first turns asks for the rest alone."""
    job = {"rounds": 3, "agents": AGENTS, "conversations": [{"id": "c", "prompt": "Go."}]}
    job_id = service.post_job(job)
    service.wait_ended(job_id)
    path = f"/v1/jobs/{job_id}/conversations/c"
    turns = service.get(path)["turns"]
    assert len(turns) == 6
    assert service.get(f"{path}?after=4")["turns"] == turns[4:]
    assert service.get(f"{path}?after=6")["turns"] == []
    assert service.http.get(f"{path}?after=-1").status_code == 400


def test_the_address_of_the_page_is_logged(service: Service) -> None:
    """The person who starts the service finds it there."""
    assert f"the dashboard is at {service.url}/" in service.log()


def test_all_files_of_the_page_are_in_the_package() -> None:
    """They are served from the package itself, however it is installed."""
    web = Path(__file__).parents[2] / "service" / "web"
    pages = {f"/web/{path.name}" for path in (web / "static").iterdir()} - {"/web/index.html"} | {"/"}
    gallery = {path.name for path in (web / "gallery").glob("*.yaml")}
    vendor = {f"/web/vendor/{path.name}" for path in (web / "vendor").glob("*.js")}
    assert set(page_files()) == pages | vendor | {f"/web/gallery/{name}" for name in gallery}
    offered = re.search(r"EXAMPLES = \{(.*?)\}", (web / "static" / "post.js").read_text())
    assert offered is not None
    of_files = {path.name for path in (web / "gallery").glob("*.yaml") if "{file:" in path.read_text()}  # no browser's
    assert {f"{name}.yaml" for name in re.findall(r"(\w+):", offered[1])} == gallery - of_files
    examples = Path(__file__).parents[2] / "examples"
    assert {path.name for path in examples.iterdir() if path.is_symlink()} == gallery | {
        "town_server.py",
        "personas.csv",
    }


def test_null_fields_count_as_absent(service: Service) -> None:
    """A client that writes all of its fields sees its job like any other."""
    none = {"says": None, "matches": None, "agree": None, "unchanged": None, "answer_tokens": None, "signal": None}
    until = [{**none, "agent": "a", "says": ["x"]}]
    talk = {"id": "c", "prompt": "Go.", "rounds": None, "variables": None, "until": None}
    job_id = service.post_job({"name": "null", "agents": AGENTS, "until": until, "conversations": [talk]})
    service.wait_ended(job_id)
    ((_, frame),) = frames(service, f"/v1/jobs/{job_id}/overview/events")
    assert [line["id"] for line in frame["page"]["lines"]] == ["c"]
    assert service.get(f"/v1/jobs/{job_id}/conversations/c/place")["until"] == ["a says x"]


def test_the_status_counts_a_keys_own_awaited_turns(service: Service) -> None:
    """Conversations that only a caller can continue count as open."""
    guest = {"id": "guest", "by": "caller"}
    job = {
        "agents": [guest, {**AGENTS[0], "speak_after_within_round": ["guest"]}],
        "conversations": [{"prompt": "Go."}] * 3,
    }
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    before = service.get("/v1/status")
    job_id = httpx.post(f"{service.url}/v1/jobs", json=job, headers=headers).json()["id"]

    def status_of(name: str) -> Document:
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        told: Document = httpx.get(f"{service.url}/v1/status", headers=headers).json()
        return told

    wait_for(lambda: status_of("alice")["awaited"] == 3, "they are awaited")
    assert status_of("bob")["awaited"] == 0
    wait_for(lambda: status_of("root")["awaited"] == before["awaited"] + 3, "all keys' are counted")
    now = status_of("root")
    opened = [each["conversations"]["total"] - each["conversations"]["finished"] for each in (before, now)]
    assert (opened[1] - opened[0], now["jobs"] - before["jobs"]) == (3, 1)
    assert len(service.get("/v1/overview/awaited")["turns"]) == now["awaited"]
    service.http.post(f"/v1/jobs/{job_id}/cancel")


@pytest.mark.system
def test_a_request_links_to_its_turn_unless_two_have_one_name(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Jobs may share a name; a link to the wrong one would be worse than none."""
    model = scripted_model(free_ports(1), slots=3, hold=r"/\S+/go\b")
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        talk = {"id": "q0", "prompt": f"{tmp_path}/go"}
        job: Document = {"agents": [{"id": "a", "model": "m"}], "conversations": [talk]}
        try:
            ids = [service.post_job({**job, "name": name}) for name in ("one", "two", "two")]
            running = [f"/v1/jobs/{job_id}" for job_id in ids]
            wait_for(
                lambda: all(service.get(each)["progress"]["turns"]["in_flight"] for each in running), "all are asked"
            )
            ((_, frame),) = frames(service, "/v1/overview/events")
        finally:
            (tmp_path / "go").touch()
        names = {request["job_name"] for worker in frame["status"]["workers"] for request in worker["requests"]}
        assert names == {"one/q0/a/0", "two/q0/a/0"}
        assert frame["turns"] == {"one/q0/a/0": [ids[0], "q0", "a", 0]}
