"""Named keys: their identity, their rights, and what they learn of other keys' jobs."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import anyio
import httpx
import pytest
import yaml
from fastapi.routing import APIRoute, iter_route_contexts

from service.api.app import build_routes
from service.api.door.access import ROUTES, AccessCheck, Rates
from service.api.errors.forms import SERVED
from service.api.openai.routes import Relays
from service.config.load import build_config
from service.config.source import LoadedConfig
from service.config.workers import worker_specs
from service.node.node import open_node
from service.node.reloader import Reloader
from service.upgrade.upgrader import Upgrader
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import wait_for

SCOPES: Mapping[str, list[str]] = {
    "alice": ["read", "submit"],
    "bob": ["read", "submit"],
    "viewer": ["read"],
    "poster": ["submit"],
    "root": ["admin"],
}
BOUNDS: Mapping[str, dict[str, object]] = {
    "slow": {"scopes": ["read", "submit"], "requests_per_s": 0.1},
    "bounded": {"scopes": ["read", "submit"], "queued": 5},
    "heavy": {"share": 3},
    "light": {"share": 1},
}


def as_(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer secret-of-{name}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("keys")
    hashed = [{"name": "bob", "sha256": hashlib.sha256(b"secret-of-bob").hexdigest(), "scopes": SCOPES["bob"]}]
    (folder / "keys.yaml").write_text(yaml.safe_dump(hashed))
    (folder / "keys.yaml").chmod(0o600)
    keys: list[dict[str, object]] = [
        {"name": name, "key": f"secret-of-{name}", "scopes": SCOPES[name]} for name in SCOPES if name != "bob"
    ]
    keys += [{"name": name, "key": f"secret-of-{name}", **bounds} for name, bounds in BOUNDS.items()]
    server = {"keys": keys, "keys_file": "keys.yaml", "api_keys": ["secret-of-all"]}
    models = {
        "m": scripted_model(free_ports(1)),
        "held": scripted_model(free_ports(1), slots=1, hold=r"(?:/[\w.-]+)+/go"),
    }
    with serving(folder, free_ports(1), models, server) as running:
        yield running


def test_every_configured_key_is_known_and_no_other(service: Service) -> None:
    """Keys come from the configuration, the file of hashes and ``api_keys``; none of them is ever logged."""
    for name in (*SCOPES, "all"):
        assert httpx.get(f"{service.url}/readyz", headers=as_(name)).status_code == 200, name
    for headers in (as_("nobody"), {"Authorization": "Basic secret-of-alice"}, {"Authorization": "Bearer"}):
        answer = httpx.get(f"{service.url}/readyz", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "not_authorised")
    answer = httpx.get(f"{service.url}/v1/status")
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authorised")
    assert "secret-of" not in service.log()


@pytest.mark.system
def test_each_route_needs_the_scope_of_the_table(service: Service) -> None:
    """A key without the scope gets 403 with the scope's name, before anything is looked up."""
    for (method, path), access in ROUTES.items():
        for name, scopes in SCOPES.items():
            if access.scope is None or access.scope in scopes or "admin" in scopes:
                continue
            url = service.url + path.replace("{model:path}", "m").replace("{round_number}", "0")
            answer = httpx.request(method, url, headers=as_(name))
            told = answer.json().get("error") or answer.json()  # OpenAI's form, or a problem
            assert answer.status_code == 403, (method, path, name)
            assert told.get("code") == "scope_missing" or told["type"] == "permission_error"
            assert f"scope {access.scope}" in (told.get("detail") or told["message"])
    assert service.http.get("/v1/workers", headers=as_("viewer")).status_code == 200
    assert service.http.post("/v1/workers/m-0/resume", headers=as_("root")).status_code == 202


async def test_no_route_is_missing_from_the_table(tmp_path: Path) -> None:
    """Every route of the app has a row and passes the check that reads it; no row is of a removed route."""
    document = {"store": {"url": "memory"}, "models": {"m": {"engine": "attached", "url": "http://127.0.0.1:9"}}}
    config = build_config(document, {}, "test", {})
    loaded = LoadedConfig(config=config, specs=worker_specs(config, tmp_path, tmp_path))
    async with open_node(config, loaded.specs, tmp_path) as node:
        relays = Relays(node, config.limits, config.server, has_several_keys=False)
        reloader, upgrader = Reloader(node, loaded, lambda: loaded), Upgrader(node, listener_fd=0)
        access = AccessCheck(Rates(time.monotonic))
        app = build_routes(node, config, [tmp_path], reloader, upgrader, relays, access)
        found: set[tuple[str, str]] = set()
        for route in iter_route_contexts(app.routes):
            assert isinstance(route.original_route, APIRoute), f"{route.path}: nothing stands before it"
            assert route.path is not None
            found |= {(method, route.path) for method in route.methods or ()}
        await node.shut_down(0, anyio.Event())
    assert found | {("POST", path) for path in SERVED} == set(ROUTES)  # those are RelayedPaths


def post(
    service: Service, who: str, prompt: str = "Go.", *, key: str | None = None, model: str = "m", **fields: object
) -> httpx.Response:
    document = {"agents": [{"id": "a", "model": model}], "conversations": [{"id": "c", "prompt": prompt}], **fields}
    headers = as_(who) if key is None else {**as_(who), "Idempotency-Key": key}
    return service.http.post("/v1/jobs", json=document, headers=headers)


OF_A_JOB = [path for (method, path) in ROUTES if method == "GET" and "{job_id}" in path]


def test_a_job_exists_for_its_key_and_for_admin_alone(service: Service) -> None:
    """For other keys it is not found: they can neither read, list, follow, cancel nor delete it."""
    posted = post(service, "alice", name="secret plan").json()
    assert posted["key"] == "alice"
    service.wait_ended(posted["id"])
    for path in OF_A_JOB:
        url = path.format(job_id=posted["id"], conversation_id="c", agent="a", round_number=0)
        for name, status in (("alice", 200), ("root", 200), ("all", 200), ("bob", 404), ("viewer", 404)):
            answer = service.http.get(url, headers=as_(name))
            if status == 200 and path.endswith("/rollouts"):
                assert answer.json()["code"] == "nothing_recorded"
                continue
            assert answer.status_code == status, (path, name)
            if status == 404:
                assert answer.json()["code"] == "job_not_found"
    for method, path in (("POST", f"/v1/jobs/{posted['id']}/cancel"), ("DELETE", f"/v1/jobs/{posted['id']}")):
        assert service.http.request(method, path, headers=as_("bob")).status_code == 404
    for name, is_listed in (("alice", True), ("root", True), ("bob", False), ("viewer", False)):
        listed = service.http.get("/v1/jobs", headers=as_(name)).json()["jobs"]
        assert (posted["id"] in [job["id"] for job in listed]) is is_listed
    assert service.http.delete(f"/v1/jobs/{posted['id']}", headers=as_("alice")).status_code == 204


def test_idempotency_keys_are_scoped_to_their_key(service: Service) -> None:
    """The same word of two callers means two jobs, and neither learns of the other."""
    first, second = (post(service, name, key="once") for name in ("alice", "bob"))
    assert (first.status_code, second.status_code) == (202, 202)
    again = post(service, "alice", key="once")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    other = post(service, "alice", key="once", name="other")
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    assert "'once'" in other.json()["detail"]


def test_a_key_gives_no_higher_priority_than_allowed(service: Service) -> None:
    """The default is 0; ``api_keys`` are not bounded."""
    refused = post(service, "alice", priority=1)
    assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "priority")
    for name, priority in (("alice", 0), ("alice", -3), ("all", 7)):
        assert post(service, name, priority=priority).status_code == 202


def test_only_a_key_that_may_see_a_job_speaks_its_turns(service: Service) -> None:
    """It also needs the scope to submit; for other keys neither the job nor its turn exists, and no list shows it."""
    agents = [{"id": "guest", "by": "caller"}, {"id": "a", "model": "m", "speak_after_within_round": ["guest"]}]
    posted = post(service, "alice", agents=agents).json()
    path = f"/v1/jobs/{posted['id']}/conversations/c/turns/guest/0"
    listed = f"/v1/jobs/{posted['id']}/awaited"
    wait_for(lambda: service.http.get(listed, headers=as_("alice")).json()["awaited"], "the guest is awaited")
    for name, seen in (("alice", 1), ("root", 1), ("bob", 0), ("viewer", 0)):
        awaited = service.http.get("/v1/awaited", headers=as_(name)).json()["awaited"]
        assert [turn["job"] for turn in awaited] == [posted["id"]] * seen
    for name, status in (("bob", 404), ("poster", 404), ("viewer", 403), ("alice", 201)):
        answer = service.http.post(path, json={"text": "Hello."}, headers=as_(name))
        assert answer.status_code == status, name
    service.wait_ended(posted["id"])
    assert service.http.delete(f"/v1/jobs/{posted['id']}", headers=as_("alice")).status_code == 204


def test_the_names_of_another_keys_job_are_hidden(service: Service, tmp_path: Path) -> None:
    """Snapshots count all turns, and name only the key's own; admin sees all."""
    jobs = [post(service, "alice", f"{tmp_path}/go", model="held", name="secret plan").json()["id"] for _ in range(2)]
    wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 1, "one runs")
    for name, is_named in (("alice", True), ("root", True), ("bob", False), ("viewer", False)):
        status = service.http.get("/v1/status", headers=as_(name)).json()
        assert status["pools"]["ready"] == 1
        assert [head["job"] for head in status["heads"]["ready"]] == (jobs[1:] if is_named else [])
        assert ("secret plan" in json.dumps(status)) is is_named
        for path in ("/v1/workers", "/v1/workers/held-0"):
            workers = service.http.get(path, headers=as_(name)).text
            assert ("secret plan" in workers) is (name == "root")
        assert "secret plan" not in service.http.get("/metrics", headers=as_(name)).text
    (tmp_path / "go").touch()
    for job in jobs:
        assert service.wait_ended(job)["state"] == "completed"


def test_a_key_submits_no_more_often_than_its_rate(service: Service) -> None:
    """At least one job may come at once; neither reads nor another key's work count."""
    assert post(service, "slow").status_code == 202
    refused = post(service, "slow")
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
    assert 1 <= int(refused.headers["Retry-After"]) <= 10
    assert service.http.get("/v1/jobs", headers=as_("slow")).status_code == 200
    assert post(service, "alice").status_code == 202


def test_no_more_turns_of_a_key_wait_than_allowed(service: Service, tmp_path: Path) -> None:
    """Turns that have ended or are on slots do not count; a job that could never be accepted is faulty."""
    go = f"{tmp_path}/go"

    def conversations(count: int) -> list[dict[str, str]]:
        return [{"prompt": go} for _ in range(count)]

    too_large = post(service, "bounded", model="held", conversations=conversations(6))
    assert (too_large.status_code, too_large.json()["errors"][0]["path"]) == (422, "conversations")
    first = post(service, "bounded", model="held", conversations=conversations(4)).json()["id"]
    wait_for(lambda: service.get(f"/v1/jobs/{first}")["progress"]["turns"]["in_flight"] == 1, "one runs")
    second = post(service, "bounded", model="held", conversations=conversations(2)).json()["id"]  # three wait, and two
    refused = post(service, "bounded", model="held")
    assert (refused.status_code, refused.json()["code"]) == (429, "too_much_queued")
    assert refused.headers["Retry-After"] == "5"
    assert post(service, "alice").status_code == 202
    line = {"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "x"}]}
    batch = service.http.post(
        "/v1/jobs",
        content=b"\n".join([json.dumps(line).encode()] * 3),
        headers={**as_("bounded"), "Content-Type": "application/x-ndjson"},
    )
    assert [json.loads(line)["code"] for line in batch.text.splitlines()] == ["too_much_queued"] * 3
    (tmp_path / "go").touch()
    for job in (first, second):
        service.wait_ended(job)
    assert post(service, "bounded", conversations=conversations(5)).status_code == 202


def read_usage(service: Service, name: str, **query: str) -> list[dict[str, object]]:
    answer = service.http.get("/v1/usage", params=query, headers=as_(name))
    assert answer.status_code == 200, answer.text
    return list(answer.json()["usage"])


def test_the_usage_of_each_key_is_reported(service: Service) -> None:
    """By job, also after its deletion. Invalid answers count as wasted, and other keys' usage is hidden."""
    validation = {"pattern": "never this", "retries": 1, "constrain": "off"}
    agents = [{"id": "a", "model": "m"}, {"id": "b", "model": "m", "validation": validation}]
    mine = post(service, "alice", agents=agents).json()["id"]
    others = post(service, "bob").json()["id"]
    for job in (mine, others):
        service.wait_ended(job)
    service.http.delete(f"/v1/jobs/{mine}", headers=as_("alice")).raise_for_status()
    rows = {row["agent"]: row for row in read_usage(service, "alice", by="agent,job,model") if row["job"] == mine}
    a, b = rows["a"], rows["b"]
    assert (a["model"], a["turns"], a["attempts"], a["wasted_tokens"]) == ("m", 1, 1, 0)
    assert (a["prompt_tokens"], a["answer_tokens"]) == (7, 3)  # figures of the scripted engine
    assert (b["turns"], b["attempts"], b["prompt_tokens"], b["answer_tokens"]) == (0, 2, 0, 0)
    assert b["wasted_tokens"] == 2 * (7 + 3)
    assert float(str(b["slot_s"])) > 0
    today = datetime.now(UTC).date().isoformat()
    keys = {row["key"] for row in read_usage(service, "root", by="key,day", since=today)}
    assert {"alice", "bob"} <= keys
    assert {row["key"] for row in read_usage(service, "alice", by="key")} == {"alice"}
    assert others not in {row["job"] for row in read_usage(service, "alice", by="job")}
    assert [row.keys() & {"key", "job"} for row in read_usage(service, "root", by="")] == [set()]
    assert read_usage(service, "root", until="2020-01-01") == []
    cut = service.http.get("/v1/usage?by=job&limit=1", headers=as_("root")).json()
    assert (len(cut["usage"]), cut["is_cut"]) == (1, True)
    for query in ("by=key,key", "by=color", "since=yesterday", "limit=0"):
        assert service.http.get(f"/v1/usage?{query}", headers=as_("root")).status_code == 400, query


def test_waiting_keys_are_served_by_their_shares(service: Service, tmp_path: Path) -> None:
    """Neither the order of arrival nor the number of waiting turns matters."""
    go = f"{tmp_path}/go"
    first = post(service, "heavy", go, model="held").json()["id"]
    wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 1, "the slot is taken")
    talks = [{"prompt": "Go."} for _ in range(12)]
    light, heavy = (post(service, who, model="held", conversations=talks).json()["id"] for who in ("light", "heavy"))
    (tmp_path / "go").touch()
    for job in (first, light, heavy):
        service.wait_ended(job)
    starts = sorted(
        (talk["turns"][0]["started_at"], job)
        for job in (light, heavy)
        for talk in service.get(f"/v1/jobs/{job}/result")["conversations"]
    )
    served = Counter(job for _, job in starts[:12])
    assert 8 <= served[heavy] <= 10


def test_a_conversation_may_begin_with_what_its_key_may_read(service: Service) -> None:
    """Another key's job does not exist for it; admin may fork it, and loses what its owner deletes."""
    source = post(service, "alice", name="secret plan").json()["id"]
    service.wait_ended(source)
    heirs = [{"id": "c", "from": {"job": source, "conversation": "c"}}]
    answers = {name: post(service, name, rounds=2, conversations=heirs) for name in ("alice", "bob", "root")}
    assert {name: answer.status_code for name, answer in answers.items()} == {"alice": 202, "bob": 404, "root": 202}
    assert answers["bob"].json()["code"] == "job_not_found"
    jobs = {name: answers[name].json()["id"] for name in ("alice", "root")}
    for job_id in jobs.values():
        service.wait_ended(job_id)
    assert service.http.delete(f"/v1/jobs/{source}", headers=as_("alice")).status_code == 204

    def inherited(name: str) -> int:
        told = service.http.get(f"/v1/jobs/{jobs[name]}/result", headers=as_(name)).json()["conversations"]
        return sum(turn["inherited"] is not None for talk in told for turn in talk["turns"])

    assert (inherited("alice") > 0, inherited("root")) == (True, 0)
