"""Access rules of the door, and the bounds of a connection: foreign pages, rebound names, slow and huge requests."""

import json
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from service.api.door.connections import MOST_FILES, Door
from service.api.errors.forms import SERVED, is_of_surface
from tests.harness.processes import running_program
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

JOB = {"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "Go."}]}
EXTENSION = "chrome-extension://abcdefghijklmnopabcdefghijklmnop"
PAGE = {"Origin": "http://evil.example"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    server = {"hosts": ["box.lan"], "origins": ["http://localhost:3000", EXTENSION, "app://obsidian.md"]}
    with serving(
        tmp_path_factory.mktemp("door"), free_ports(1), {"m": scripted_model(free_ports(1))}, server
    ) as running:
        yield running


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("code", "")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"Origin": "http://localhost:3000"}, 202),
        ({"Origin": EXTENSION}, 202),
        ({"Origin": "app://obsidian.md"}, 202),
        ({"Origin": "chrome-extension://ponmlkjihgfedcbaponmlkjihgfedcba"}, 403),
        ({"Origin": "moz-extension://obsidian.md"}, 403),
        ({"Host": "localhost:1"}, 202),
        ({"Host": "127.8.8.8"}, 202),
        ({"Host": "[::1]:8080"}, 202),
        ({"Host": "box.lan:8080"}, 202),
        ({"Host": "box.lan:8080", "Origin": "http://box.lan:8080"}, 202),
        ({"Host": "evil.example:8080"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:80@evil.example"}, 403),
        ({"Host": "localhost:x"}, 403),
        ({"Host": "evil.example:8080", **PAGE}, 403),
        (PAGE, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://localhost:3000"}, 403),
        ({"Origin": "http://localhost"}, 403),
    ],
)
def test_without_keys_only_requests_of_this_machine_are_taken(
    service: Service, headers: dict[str, str], status: int
) -> None:
    """No page of another origin posts jobs, and no name that was rebound to us reads any."""
    assert service.http.post("/v1/jobs", json=JOB, headers=headers).status_code == status
    read = service.http.get("/v1/jobs", headers=headers)
    assert read.status_code == (200 if status == 202 else 403)
    if status == 403:
        assert code(read) == (403, "foreign_origin")
        assert service.http.post("/v1/workers/m-0/restart", headers=headers).status_code == 403


@pytest.mark.parametrize(("origin", "status"), [(EXTENSION, 200), ("app://obsidian.md", 200), ("app://other", 400)])
def test_extensions_of_browsers_pass_the_preflight(service: Service, origin: str, status: int) -> None:
    """A browser asks first, and accepts no answer that does not name its origin."""
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = service.http.request("OPTIONS", "/v1/chat/completions", headers=asks)
    assert answer.status_code == status
    assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


def test_health_answers_under_any_host_name(service: Service) -> None:
    """Orchestrators probe by an address of their own."""
    for path in ("/healthz", "/readyz"):
        assert service.http.get(path, headers={"Host": "10.1.2.3:8080", **PAGE}).status_code == 200


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", None]
)
def test_only_json_is_accepted(service: Service, media: str | None) -> None:
    """A page can send other types without a preflight request."""
    content, headers = b'{"agents": []}', {"Content-Type": media} if media else {}
    for path in ("/v1/jobs", "/v1/workers/m-0/drain", "/v1/models/m/adapters"):
        assert code(service.http.post(path, content=content, headers=headers)) == (415, "media_type_unknown")
    restarts = service.get("/v1/workers/m-0")["restarts"]
    assert restarts == 0


def test_an_allowed_page_gets_the_headers_of_cors(service: Service) -> None:
    """Browsers ask first, and show an answer only to allowed pages."""
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    asked = service.http.options("/v1/jobs", headers={**headers, "Access-Control-Request-Headers": "content-type"})
    assert asked.headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = service.http.options("/v1/jobs", headers={**headers, **PAGE})
    assert "access-control-allow-origin" not in refused.headers


def test_with_keys_the_host_does_not_matter_but_the_page_does(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Foreign pages have no key; a client with a key may be anywhere."""
    models = {"m": scripted_model(free_ports(1))}
    with serving(tmp_path, free_ports(1), models, {"api_keys": ["one"]}) as service:
        assert service.http.get("/v1/jobs", headers={"Host": "roundhouse.example"}).status_code == 200
        assert code(service.http.get("/v1/jobs", headers=PAGE)) == (403, "foreign_origin")
        assert code(httpx.get(f"{service.url}/v1/jobs", headers=PAGE)) == (401, "not_authorised")


def say(service: Service, *pieces: bytes) -> bytes:
    """Send bytes that may be no valid request; return what came until the connection was closed."""
    with closing(socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), LIMIT_S)) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while received := connection.recv(65536):
                answer += received
        except ConnectionError:
            pass
        return answer


HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST_TWICE = (
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
)
CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ((HEAD, b"X: " + b"x" * Door.HEAD_BYTES, b"\r\n\r\n"), b"431"),
        ((b"GET /" + b"x" * (256 << 10),), b"431"),
        ((HEAD, b"X: y\r\n" * 20_000, b"\r\n"), b"431"),
        ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), b"400"),
        ((b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",), b"400"),
        ((CHUNKED, b"Content-Length: 4\r\n\r\n0\r\n\r\nGET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"), b"400"),
        ((CHUNKED, b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n"), b"400"),
        ((HEAD, b"Host: evil.example\r\nConnection: close\r\n\r\n"), b"400"),
        ((POST_TWICE,), b"400"),
    ],
    ids=[
        *(
            "a header",
            "a path",
            "many headers",
            "TLS",
            "two lengths",
            "a length and chunks",
            "two codings",
            "two hosts",
        ),
        "two kinds of body",
    ],
)
def test_malformed_and_huge_requests_are_refused(service: Service, pieces: tuple[bytes, ...], status: bytes) -> None:
    """The error has our own form, and nothing of the request is kept."""
    answer = say(service, *pieces)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert b"application/problem+json" in answer


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/chat/completions"])
def test_a_body_that_is_not_utf8_is_refused(service: Service, path: str) -> None:
    """Like any other invalid JSON, and not as an internal error."""
    body = b'{"model": "m", "name": "t", "x": "\xff\xfe"}'
    answer = service.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_too_many_pipelined_requests_are_refused_and_those_before_are_answered(service: Service) -> None:
    """A client that sends without reading sees by the end of the connection where to go on."""
    answer = say(service, (HEAD + b"\r\n") * (2 * Door.PIPELINED))
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200"] * (Door.PIPELINED + 1)


def test_garbage_behind_requests_leaves_no_traceback(service: Service) -> None:
    """The running answer is dropped, no data goes to the closed connection, and the log stays silent."""
    asked = b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for count in (2, Door.PIPELINED + 5):
        for _ in range(10):
            say(service, asked * count + b"GARBAGE\r\n\r\n")
    assert service.get("/healthz") == {"status": "ok"}
    assert "Traceback" not in service.log()
    assert "Invalid HTTP" not in service.log()


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
POST = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(JOB).encode()
LAST = HEAD + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("offer", [OFFER, b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b""])
@pytest.mark.parametrize(
    "framed",
    [
        (b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY),),
        (b"Content-Length: %d\r\n\r\n" % len(BODY), BODY[:10], BODY[10:]),
        (b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b" % (len(BODY), BODY), b"\r\n0\r\n", b"X: y\r\n\r\n"),
    ],
    ids=["at once", "in pieces", "in chunks"],
)
def test_an_upgrade_header_is_ignored(service: Service, offer: bytes, framed: tuple[bytes, ...]) -> None:
    """Java's client sends one with each request. Its body is read, and so are the requests behind it."""
    asked = HEAD + offer + b"\r\n"
    answer = say(service, asked, POST + offer + framed[0], *framed[1:], asked + asked, LAST)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"202", b"200", b"200", b"200"], answer


@pytest.mark.parametrize(
    "head",
    [b"Transfer-Encoding: identity\r\n", b"Content-Length: 5\r\nContent-Length: 6\r\n", b"Content-Length: x\r\n"],
)
def test_a_body_of_unknown_length_with_an_upgrade_header_is_refused(service: Service, head: bytes) -> None:
    """As without that header: the rest must not be taken for another request."""
    answer = say(service, POST + OFFER + head + b"\r\n" + LAST)
    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert len(re.findall(rb"HTTP/1\.1 (\d+)", answer)) == 1


SLOW = """
import asyncio, sys
import uvicorn
from service.api.door.leaving import LeavingDoor
from service.api.door.http_server import HttpServer
from service.serve import listen

class Quick(LeavingDoor):
    HEAD_S, BODY_S, CLOSING_S, GIVES_WAY_S = 1.0, 1.0, 1.0, 0.2

async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

config = uvicorn.Config(app, lifespan="off", http=Quick, ws="none", limit_concurrency=8,
                        log_config=None)
asyncio.run(HttpServer(config, listen("127.0.0.1", int(sys.argv[1]))).run_until_told())
"""


def listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def slow_door(free_ports: Callable[[int], int]) -> Iterator[int]:
    """The real door with shorter times, over an application that reads and answers."""
    port = free_ports(1)
    with running_program([sys.executable, "-c", SLOW, str(port)]):
        wait_for(lambda: listens(port), "it listens")
        yield port


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"", b""),
        (b"GET / HT", b"HTTP/1.1 408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", b"HTTP/1.1 408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", b"HTTP/1.1 408"),
    ],
    ids=["nothing", "half a head", "half a body", "half a chunked body"],
)
def test_a_client_that_stalls_is_disconnected(slow_door: int, first: bytes, status: bytes) -> None:
    """Half-sent requests hold no connection for ever."""
    with closing(socket.create_connection(("127.0.0.1", slow_door), LIMIT_S)) as connection:
        if first:
            connection.sendall(first)
        answer = b""
        while received := connection.recv(65536):
            answer += received
        assert answer.startswith(status)
        assert bool(answer) is bool(status)


def test_connections_beyond_the_bound_are_refused_at_once(slow_door: int) -> None:
    """Descriptors are left for engines and the store; a client that waits a moment gets in."""
    open_ones = [half_asked(slow_door) for _ in range(8 + Door.KEPT)]
    try:
        with closing(socket.create_connection(("127.0.0.1", slow_door), LIMIT_S)) as one_more:
            answer = one_more.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer.lower()
    finally:
        for connection in open_ones:
            connection.close()
    wait_for(lambda: httpx.get(f"http://127.0.0.1:{slow_door}/").status_code == 200, "there is room again")


def half_asked(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    connection.sendall(b"GET / HT")
    return connection


def test_the_longest_idle_connection_makes_room(slow_door: int) -> None:
    """Idle connections keep no other client out."""
    idle = [socket.create_connection(("127.0.0.1", slow_door), LIMIT_S) for _ in range(8)]
    try:
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{slow_door}/").status_code == 200, "one makes room", 0.9)
        assert idle[0].recv(1) == b""
    finally:
        for connection in idle:
            connection.close()


LIMITS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from service.api.door.connections import most_connections
print(most_connections(2, 8), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "most", "now"), [(256, 1024, 424, 1024), (256, 256, 40, 256), (64, 64, 16, 64)]
)
def test_descriptors_are_left_for_engines(soft: int, hard: int, most: int, now: int) -> None:
    """The soft limit is raised to the hard one; connections get half of what engines and the store do not need."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= hard < MOST_FILES
    told = subprocess.run(
        [sys.executable, "-c", LIMITS, str(soft), str(hard)], check=True, capture_output=True, text=True
    )
    assert told.stdout.split() == [str(most), str(now)]


def test_a_wrong_method_lists_all_methods_of_the_path(service: Service) -> None:
    """Several routes may serve them."""
    for path, allowed in (
        ("/v1/jobs", "GET, HEAD, POST"),
        ("/v1/jobs/x", "DELETE, GET, HEAD"),
        ("/healthz", "GET, HEAD"),
    ):
        answer = service.http.put(path, json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_a_head_is_answered_as_a_get_without_its_body(service: Service) -> None:
    """By every path with GET, whatever its answer: an error, and a stream without an end."""
    job_id = service.post_job(JOB)
    paths = ["/", "/healthz", "/readyz", "/v1/models", "/v1/models/m", "/v1/models/nope", "/v1/status", "/v1/workers"]
    for path in [*paths, f"/v1/jobs/{job_id}/events", "/v1/overview/events", "/metrics", "/nowhere", "/web/main.js"]:
        head = service.http.head(path)
        with service.http.stream("GET", path) as answer:
            assert (head.status_code, head.content) == (answer.status_code, b""), path
            assert head.headers["content-type"] == answer.headers["content-type"], path
    assert service.http.head("/v1/chat/completions").status_code == 405
    assert service.http.head("/healthz").headers["content-length"] == str(len(service.http.get("/healthz").content))
    wait_for(lambda: 'code="200",method="HEAD",route="/v1/models"' in measured(service), "a HEAD is counted as one")


def measured(service: Service) -> str:
    """Return the metrics of HTTP requests."""
    lines = [line for line in service.http.get("/metrics").text.splitlines() if "http_requests_total{" in line]
    return "\n".join(lines)


def test_a_byte_order_mark_is_skipped(service: Service) -> None:
    """Some editors write one before JSON; engines skip it as well."""
    marked = b"\xef\xbb\xbf" + json.dumps(JOB).encode()
    headers = {"Content-Type": "application/json"}
    assert service.http.post("/v1/jobs", content=marked, headers=headers).status_code == 202
    lines = service.http.post(
        "/v1/jobs", content=marked + b"\n" + marked, headers={"Content-Type": "application/x-ndjson"}
    )
    assert [json.loads(line)["status"] for line in lines.text.splitlines()] == [202, 202]
    twice = service.http.post("/v1/jobs", content=b"\xef\xbb\xbf" + marked, headers=headers)
    assert code(twice) == (400, "body_malformed")


def test_errors_are_described_in_the_form_that_is_sent(service: Service) -> None:
    """A program generated from the description reads them."""
    for path, operations in service.get("/openapi.json")["paths"].items():
        form = "application/json" if is_of_surface(path) else "application/problem+json"
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert list(response["content"]) == [form], (path, status)
        if path in SERVED | {"/v1/jobs"}:
            asked = service.http.post(path, content=b"{", headers={"Content-Type": "application/json"})
            assert (asked.status_code, asked.headers["Content-Type"]) == (400, form), path
    assert service.http.get("/v1/models/none").headers["Content-Type"] == "application/json"
    assert list(service.get("/openapi.json")["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == [
        "text/plain"
    ]
