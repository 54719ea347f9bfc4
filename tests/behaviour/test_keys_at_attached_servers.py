"""An attached server that mixes up its answers mixes up those of one key only."""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from tests.harness.service import serving

KEYS = {name: f"{name}-{'k' * 24}" for name in ("alice", "bob")}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.heard: dict[tuple[str, int], list[str]] = defaultdict(list)  # words by connection

    def words(self) -> list[list[str]]:
        """Return the keys whose words came over each connection."""
        return [
            [name for name in KEYS if name in body] for bodies in self.heard.values() for body in [" ".join(bodies)]
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard[self.client_address].append(body.decode())
        message = {"role": "assistant", "content": "yes"}
        self._send({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {}})

    def log_message(self, *_: object) -> None:
        return

    def _send(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def attached_server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_no_connection_to_an_attached_server_is_shared_by_keys(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A late answer of such a server must not go to another key; one key may keep its connection."""
    keys = [{"name": name, "key": key} for name, key in KEYS.items()]
    with attached_server() as server:
        models = {"m": {"engine": "attached", "url": f"http://127.0.0.1:{server.server_port}"}}
        with serving(tmp_path, free_ports(1), models, {"keys": keys}) as service:
            for _ in range(3):
                for name, key in KEYS.items():
                    said = {"model": "m", "messages": [{"role": "user", "content": f"I am {name}."}]}
                    path, headers = f"{service.url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
                    assert httpx.post(path, json=said, headers=headers).status_code == 200
        mixed = [names for names in server.words() if len(names) > 1]
        assert not mixed
        assert sum("alice" in names for names in server.words()) < 3, "those of one key are kept"
