"""A scripted engine that serves one path and refuses all others, for example a model that only embeds texts.

It takes llama-server's flags, and uses the standard library only.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--serves", default="/v1/embeddings", help="the one path")
    parser.add_argument("--status", type=int, default=500, help="refuse what asks by any other with this status")
    parser.add_argument("--mute-on", help="never answer a request that holds this text")
    parser.add_argument("--hang-on", help="from a request that holds this text on, answer none")
    return parser.parse_known_args()[0]


OPTIONS = _arguments()
HANGS = threading.Event()
NEVER = threading.Event()


class Answer(BaseHTTPRequestHandler):
    """Answers one request per connection; its front answers probes in any case."""

    def do_GET(self) -> None:
        """Report readiness, without counters."""
        self._send(200 if self.path == "/v1/models" else 404, {"data": []})

    def do_POST(self) -> None:
        """Answer with a vector or a text, or refuse."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if OPTIONS.hang_on is not None and OPTIONS.hang_on in body:
            HANGS.set()
        if HANGS.is_set() or (OPTIONS.mute_on is not None and OPTIONS.mute_on in body):
            NEVER.wait()
        if self.path != OPTIONS.serves or "REFUSED" in body:
            status = OPTIONS.status if self.path != OPTIONS.serves else 500
            self._send(status, {"error": {"code": status, "message": "no", "type": "server_error"}})
        elif self.path == "/v1/embeddings":
            self._send(200, {"data": [{"index": 0, "embedding": [0.6, 0.8]}]})
        else:
            self._send(200, {"choices": [{"index": 0, "text": "a"}]})

    def _send(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_what: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer((OPTIONS.host, OPTIONS.port), Answer)
    server.daemon_threads = True
    server.serve_forever()
