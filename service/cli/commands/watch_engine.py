"""Probes engines that Roundhouse does not own: once, or again and again beside an HTTP server for orchestrators."""

import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Final

import typer

from service.cli.engine_probe import HANGS, LIMIT_S, SILENT, UNSURE, WORKS, Reading, Target, examine, target_of
from service.cli.engine_probe import probe as probe_once

POLL_S: Final = 2.0
POLL_SILENT_S: Final = 0.5
Url = Annotated[str, typer.Argument(help="The address of the engine's server.", metavar="URL")]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", help="What the engine is.", metavar="vllm|sglang|llama.cpp", show_default="it is found out"
    ),
]
ProbeKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="ROUNDHOUSE_PROBE_KEY", help="The engine's key.")
]
LimitOption = Annotated[
    float, typer.Option("--limit", help="Seconds that it may owe an answer without a sign of life.", metavar="S")
]


class EngineWatch:
    """One engine's last reading, which one thread takes and those of the server show."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reading = Reading(verdict=UNSURE, reason="it has not been asked yet", at=time.monotonic())
        self._verdicts: Counter[str] = Counter()

    def run(self) -> None:
        """Take readings until the process ends."""
        before: Reading | None = None
        pause = threading.Event()
        while True:
            before = examine(self._target, before, lambda _: None)
            self._reading = before
            self._verdicts[before.verdict] += 1
            pause.wait(POLL_S if before.owed_since is None else POLL_SILENT_S)

    def answer(self, path: str) -> tuple[int, str]:
        """Return status and text for a path of the server."""
        reading = self._reading
        words = f"{reading.verdict}: {reading.reason}\n"
        if path == "/live":
            return 503 if reading.verdict == HANGS else 200, words
        if path == "/ready":
            return 200 if reading.verdict in {WORKS, SILENT} else 503, words
        return (200, self._metrics(reading)) if path == "/metrics" else (404, "/live, /ready or /metrics\n")

    def _metrics(self, reading: Reading) -> str:
        silent_s = 0.0 if reading.owed_since is None else time.monotonic() - reading.owed_since
        states = {verdict: verdict.replace(" ", "_") for verdict in (WORKS, SILENT, UNSURE, HANGS)}
        return "\n".join(
            [
                "# TYPE roundhouse_probe_verdict gauge",
                *(
                    f'roundhouse_probe_verdict{{verdict="{name}"}} {int(reading.verdict == v)}'
                    for v, name in states.items()
                ),
                "# TYPE roundhouse_probe_silent_seconds gauge",
                f"roundhouse_probe_silent_seconds {silent_s:.3f}",
                "# TYPE roundhouse_probe_readings_total counter",
                *(
                    f'roundhouse_probe_readings_total{{verdict="{name}"}} {self._verdicts[v]}'
                    for v, name in states.items()
                ),
                "",
            ]
        )


def probe(
    url: Url,
    engine: EngineOption = None,
    api_key: ProbeKeyOption = None,
    limit: LimitOption = LIMIT_S,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if the verdict is unknown.")] = False,
) -> None:
    """Tell a hung engine of others from a busy one: exit with 1 if it hangs, else with 0."""
    raise typer.Exit(probe_once(_target(url, engine, api_key, limit), is_strict=strict))


def watch_engine(
    url: Url,
    port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=1, max=65535)],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    engine: EngineOption = None,
    api_key: ProbeKeyOption = None,
    limit: LimitOption = LIMIT_S,
) -> None:
    """Probe an engine of others again and again, and serve the verdict at /live, /ready and /metrics."""
    watch = EngineWatch(_target(url, engine, api_key, limit))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = watch.answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:  # an orchestrator asks every few seconds
            return

    with ThreadingHTTPServer((host, port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        watch.run()


def _target(url: str, engine: str | None, key: str | None, limit_s: float) -> Target:
    try:
        return target_of(url, engine, key, limit_s)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
