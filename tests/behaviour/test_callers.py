"""Services for callers besides answers: webhooks, batches, keys, and jobs with a retention time."""

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from service.formats.hosts import canonical_host
from tests.harness.processes import running_program
from tests.harness.service import ROUNDHOUSE, Document, Service, run_command, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

Ports = Callable[[int], int]
SECRET = "whsec_c2l4dGVlbiBieXRlcyBhdCBsZWFzdA=="  # noqa: S105
JOB: Document = {"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "Speak."}]}


class Receiver:
    """An HTTP server that takes messages, and refuses the first few on request."""

    def __init__(self, port: int, refusals: int) -> None:
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self.tries: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.tries.append(self.headers["webhook-id"])
                is_taken = len(receiver.tries) > refusals
                if is_taken:
                    receiver.taken.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(204 if is_taken else 503)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = HTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{port}/ended"


@contextmanager
def receiving(port: int, refusals: int = 0) -> Iterator[Receiver]:
    receiver = Receiver(port, refusals)
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()


def hooked(private: bool = True) -> Document:
    return {"hosts": ["127.0.0.1"], "secrets": {"ours": SECRET}, "private": private, "timeout_s": 2}


@pytest.mark.system
def test_a_webhook_arrives_at_least_once_with_a_signature(tmp_path: Path, free_ports: Ports) -> None:
    """The signature follows Standard Webhooks; refusals and restarts lead to another attempt with the same id."""
    model = {"m": scripted_model(free_ports(1))}
    with (
        receiving(free_ports(1), refusals=2) as receiver,
        serving(tmp_path, free_ports(1), model, webhooks=hooked()) as service,
    ):
        job = service.post_job({**JOB, "webhook": {"url": receiver.url, "secret": "ours"}, "metadata": {"k": 1}})
        wait_for(lambda: receiver.tries, "the first try was refused")
        service.kill()
        service.start()
        wait_for(lambda: receiver.taken, "it is delivered")
        wait_for(lambda: service.get(f"/v1/jobs/{job}/deliveries")["deliveries"][0]["state"] != "waiting", "noted")
        (delivery,) = service.get(f"/v1/jobs/{job}/deliveries")["deliveries"]
    assert (delivery["state"], delivery["attempts"] >= 3, delivery["last_error"]) == ("delivered", True, None)
    headers, body = receiver.taken[0]
    told = Webhook(SECRET).verify(body, headers)
    assert (told["type"], told["data"]["id"], told["data"]["state"]) == ("job.ended", job, "completed")
    assert (told["data"]["metadata"], told["data"]["turns"]) == ({"k": 1}, {"completed": 1})
    assert set(receiver.tries) == {headers["webhook-id"]}


@pytest.mark.system
def test_private_addresses_are_refused_unless_configured(tmp_path: Path, free_ports: Ports) -> None:
    """A job must not make Roundhouse call programs of the internal network."""
    model = {"m": scripted_model(free_ports(1))}
    with (
        receiving(free_ports(1)) as receiver,
        serving(tmp_path, free_ports(1), model, webhooks=hooked(private=False)) as service,
    ):
        job = service.post_job({**JOB, "webhook": {"url": receiver.url}})

        def error() -> str:
            told = service.get(f"/v1/jobs/{job}/deliveries")["deliveries"]
            return str(told[0]["last_error"] or "") if told else ""

        wait_for(error, "it was tried")
        assert "only private addresses" in error()
        assert receiver.tries == []


@pytest.mark.system
def test_a_receiver_that_hangs_delays_no_other(tmp_path: Path, free_ports: Ports) -> None:
    """Only a few messages go to one host at a time."""
    hooks = hooked() | {"timeout_s": 5}
    with (
        socket.create_server(("127.0.0.1", free_ports(1)), backlog=100) as hanging,
        receiving(free_ports(1)) as receiver,
        serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1), slots=8)}, webhooks=hooks) as service,
    ):
        silent = f"http://127.0.0.1:{hanging.getsockname()[1]}/"
        jobs = [service.post_job({**JOB, "webhook": {"url": silent}}) for _ in range(40)]
        for job in jobs:
            service.wait_ended(job)
        service.post_job({**JOB, "webhook": {"url": receiver.url}})
        assert wait_for(lambda: receiver.taken, "the other is told") < 5


@pytest.mark.parametrize(
    ("webhook", "path"),
    [
        ({"url": "http://elsewhere.example/x"}, "webhook.url"),
        ({"url": "ftp://127.0.0.1/x"}, "webhook.url"),
        ({"url": "http://me:secret@127.0.0.1/x"}, "webhook.url"),
        ({"url": "http://127.0.0.1/x", "secret": "theirs"}, "webhook.secret"),
    ],
)
def test_a_webhook_to_a_host_that_is_not_allowed_is_a_fault(service: Service, webhook: Document, path: str) -> None:
    """The operator names hosts and secrets."""
    answer = service.http.post("/v1/jobs", json={**JOB, "webhook": webhook})
    assert answer.status_code == 422
    assert [fault["path"] for fault in answer.json()["errors"]] == [path]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Ports) -> Iterator[Service]:
    limits = {"batch": 500, "body_bytes": 10_000}
    with serving(
        tmp_path_factory.mktemp("callers"),
        free_ports(1),
        {"m": scripted_model(free_ports(1), slots=8)},
        webhooks=hooked(),
        limits=limits,
    ) as running:
        yield running


def post_lines(service: Service, *lines: str, **headers: str) -> list[Document]:
    answer = service.http.post(
        "/v1/jobs", content="\n".join(lines), headers={"content-type": "application/x-ndjson", **headers}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_batch_accepts_a_job_from_each_line_and_reports_faults_by_line(service: Service) -> None:
    """A fault in one line does not affect the others."""
    good = json.dumps(JOB)
    told = post_lines(service, good, "", "{", json.dumps({"agents": []}), good, "x" * 20_000, good)
    assert [(line["line"], line["status"]) for line in told] == [(1, 202), (2, 400), (3, 422), (4, 202), (5, 413)]
    assert told[1]["code"] == "body_malformed"
    assert {"agents", "conversations"} <= {fault["path"] for fault in told[2]["errors"]}
    for line in (told[0], told[3]):
        assert service.wait_ended(line["id"])["state"] == "completed"


def test_a_batch_that_is_posted_again_gives_the_same_jobs(service: Service) -> None:
    """A key counts line by line; three hundred lines give three hundred jobs."""
    lines = [json.dumps({**JOB, "name": f"n{number}"}) for number in range(300)]
    first = post_lines(service, *lines, **{"Idempotency-Key": "batch"})
    again = post_lines(service, *lines, **{"Idempotency-Key": "batch"})
    assert {line["status"] for line in first} == {202}
    assert [line["name"] for line in first] == [f"n{number}" for number in range(300)]
    assert {line["status"] for line in again} == {200}
    assert [line["id"] for line in again] == [line["id"] for line in first]
    assert post_lines(service, *[json.dumps(JOB)] * 501)[-1]["code"] == "body_too_large"


@pytest.mark.system
def test_ended_jobs_and_idempotency_keys_expire(tmp_path: Path, free_ports: Ports) -> None:
    """The job is deleted, and its key is free for another body."""
    store = {"keep_jobs_s": 2, "keep_keys_s": 1}
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}, store=store) as service:
        job = service.post_job(JOB, **{"Idempotency-Key": "mine"})
        other = {**JOB, "name": "other"}

        def is_free() -> bool:
            return service.http.post("/v1/jobs", json=other, headers={"Idempotency-Key": "mine"}).status_code == 202

        wait_for(is_free, "the key is free")
        wait_for(lambda: service.http.get(f"/v1/jobs/{job}").status_code == 404, "the job is released")


def test_check_shows_no_secret(tmp_path: Path) -> None:
    """A secret may be in an address, a header, a word of a command, or a variable."""
    (tmp_path / "roundhouse.yaml").write_text(
        """
store: {url: 'postgresql://me:hidden-1@db/jobs?sslpassword=hidden-2&application_name=shown'}
webhooks: {secrets: {ours: hidden-3-hidden-3-hidden}}
models:
  m:
    engine: embedded
    command: [python3, --api-key, hidden-4, --token=hidden-5, --max-tokens=7, --threads, '2']
    params: {max_tokens: 512}
    env: {DB: 'postgres://u:hidden-6@h/db', HF_TOKEN: hidden-7}
    tools:
      http: {url: 'http://u:hidden-8@127.0.0.1:1/?key=hidden-9', headers: {x: hidden-10}}
      mcp: {files: {command: [python3, --token, hidden-11, --secret=hidden-12], env: {A_KEY: hidden-13}}}
"""
    )
    shown = run_command("check", "--config", str(tmp_path / "roundhouse.yaml"))
    assert shown.returncode == 0, shown.stderr
    assert "hidden" not in shown.stdout
    assert "postgresql://me:********@db/jobs?sslpassword=********&application_name=shown" in shown.stdout
    assert "'2'" in shown.stdout
    assert "max_tokens: 512" in shown.stdout
    assert "--max-tokens=7" in shown.stdout


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("store: {url: 'postgresqll://me:hidden@db/jobs'}", "store.url: 'postgresqll' is not a store"),
        ("store: {url: 'postgresql://me:hid den@db/jobs'}", "store.url: is not a PostgreSQL URL"),
        ("store: {url: 'postgresql://me:hid%ZZden@db/jobs'}", "store.url: is not a PostgreSQL URL"),
        ("webhooks: {hosts: ['https://a.b/']}", "it stands alone"),
        ("webhooks: {hosts: ['*.a.b']}", "it stands alone"),
        ("webhooks: {secrets: {n: 'whsec_no base64 at all!'}}", "goes on in base64"),
    ],
)
def test_a_mistake_in_these_sections_is_reported_without_secrets(tmp_path: Path, section: str, told: str) -> None:
    """One line names the field, before anything is started."""
    (tmp_path / "roundhouse.yaml").write_text(f"{section}\nmodels: {{m: {{engine: embedded}}}}")
    checked = run_command("check", "--config", str(tmp_path / "roundhouse.yaml"))
    assert checked.returncode == 2
    assert told in checked.stderr
    assert "hid" not in checked.stderr.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("written", "asked"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("LocalHost", "LOCALHOST"), ("bücher.example", "xn--bcher-kva.example")],
)
def test_a_host_has_one_spelling(written: str, asked: str) -> None:
    """The operator and the caller may write it in different ways."""
    assert canonical_host(written) == canonical_host(asked)


@pytest.mark.system
def test_a_watcher_is_warned_about_expired_events(tmp_path: Path, free_ports: Ports) -> None:
    """A job keeps its newest events; a request for earlier ones reports the gap."""
    model = {"m": scripted_model(free_ports(1), tokens=2, interval=0.05)}
    store = {"keep_events": 100, "keep_jobs_s": 10}  # old events are dropped now and then
    agents = [{"id": "a", "model": "m"}]
    with serving(tmp_path, free_ports(1), model, store=store) as service:
        job = service.post_job({"agents": agents, "rounds": 100, "conversations": [{"prompt": "Go on."}] * 4})

        def watch() -> tuple[str, str]:
            with service.http.stream("GET", f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "3"}) as events:
                lines = events.iter_lines()
                return next(lines), next(lines)

        wait_for(lambda: watch()[0] == "event: gap", "the oldest are gone")
        gap = json.loads(watch()[1].removeprefix("data: "))
        assert gap["first"] == 4
        assert gap["last"] > 4
        command = [ROUNDHOUSE, "watch", job, "--url", service.url]
        with running_program(command, stdout=subprocess.PIPE, text=True) as watched:
            assert watched.stdout is not None
            assert watched.stdout.readline().rstrip().endswith("are no longer kept")
            service.http.post(f"/v1/jobs/{job}/cancel").raise_for_status()
            watched.communicate(timeout=LIMIT_S)
        assert watched.returncode == 1
