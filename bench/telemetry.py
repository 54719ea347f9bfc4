"""What telemetry costs a service: turns a second, and CPU a turn, beside a service that measures nothing.

Both run at the same time under the same load, so that whatever else the machine does slows both. One is scraped each
second, sends its spans to a receiver here, and logs JSON; the other counts nothing at all. They change places in every
second round. The bound: at most 2 % of throughput.

    python -m bench.telemetry [--rounds N] [--seconds S] [--load paced | flat-out]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import httpx
import psutil

from tests.harness.ports import find_ports

PORT: Final = find_ports(11)
ENGINE: Final = Path(__file__).parents[1] / "tests" / "harness" / "programs" / "engine.py"
SERVE: Final = "from service.cli.main import main; main()"
# Without it nothing is counted at a turn's end, which no configuration can switch off.
NOTHING: Final = "from service.telemetry.telemetry import Telemetry as T; T.take = lambda self, facts: None; "
SLOTS: Final = 16
# What an engine does: 16 slots of 50 tokens a second each, or answers so short that the service is what is busy.
LOADS: Final = {"paced": {"tokens": 32, "interval": 0.02}, "flat-out": {"tokens": 2, "interval": 0.001}}
SCRAPE_S: Final = 1.0
WARM_UP_S: Final = 4.0
WAVE_LOOK_S: Final = 0.02
WAVE_LOOKS: Final = 100
QUIET_LOOKS: Final = 5
BOUND: Final = 0.98


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and forgets them."""

    taken = 0

    def do_POST(self) -> None:
        """Take some."""
        type(self).taken += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Service:
    """One service under load, and what it has done since it was looked at last."""

    def __init__(self, http: httpx.Client, process: psutil.Process, *, is_paced: bool) -> None:
        self.http = http
        self._process = process
        self._is_paced = is_paced

    def begin(self) -> None:
        """Measure from now on."""
        self._first_wave = self._wave() if self._is_paced else (self._ended(), time.monotonic())
        self._cpu, self._turns = self._cpu_s(), self._ended()

    def measure(self) -> tuple[float, float]:
        """Return turns a second, and milliseconds of CPU a turn."""
        cpu_ms = 1000 * (self._cpu_s() - self._cpu) / max(1, self._ended() - self._turns)
        turns, at = self._wave() if self._is_paced else (self._ended(), time.monotonic())
        return (turns - self._first_wave[0]) / (at - self._first_wave[1]), cpu_ms

    def _wave(self) -> tuple[int, float]:
        """Return the turns that have ended when all slots have just ended theirs, and the time.

        Paced slots end theirs together, so a look between two waves would see up to a wave too few. Slots that have
        drifted apart have no waves, and any moment is as good.
        """
        before, quiet, at = self._ended(), 0, 0.0
        for _ in range(WAVE_LOOKS):
            time.sleep(WAVE_LOOK_S)
            ended = self._ended()
            if ended != before:
                before, quiet, at = ended, 0, time.monotonic()
            quiet += 1
            if at and quiet > QUIET_LOOKS:
                break
        return before, at

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()  # of the service alone, not of its engines
        return times.user + times.system

    def _ended(self) -> int:
        (job,) = self.http.get("/v1/jobs").json()["jobs"]
        return int(job["progress"]["turns"]["completed"])


@contextlib.contextmanager
def running(folder: Path, port: int, load: str, collector: str | None) -> Iterator[Service]:
    """Run a service under load for a block: with everything on where there is a ``collector``."""
    folder.mkdir()
    model = {
        "engine": "llama-server", "command": [sys.executable, "-I", "-S", str(ENGINE)],
        "args": LOADS[load], "port": port + 1, "slots": SLOTS,
    }  # fmt: skip
    server = {"port": port, "state_dir": str(folder / "state"), "log": "json" if collector else "text"}
    config = {"server": server, "models": {"m": model}, "telemetry": {"traces": collector is not None}}
    (folder / "config.yaml").write_text(json.dumps(config))
    code = SERVE if collector else NOTHING + SERVE
    argv = [sys.executable, "-c", code, "serve", "--config", str(folder / "config.yaml")]
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector or ""}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stderr=log, env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            _until_ready(http)
            agents = [{"id": f"a{number}", "model": "m"} for number in range(3)]
            job = {"rounds": 100, "agents": agents, "conversations": [{"prompt": "Go."}] * 200}
            http.post("/v1/jobs", json=job).raise_for_status()
            yield Service(http, psutil.Process(process.pid), is_paced=load == "paced")
    finally:
        process.terminate()
        process.wait(60)


def _until_ready(http: httpx.Client) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if http.get("/readyz").status_code == 200:
                return
        time.sleep(0.05)
    raise TimeoutError("the service does not get ready")


def play(folder: Path, load: str, seconds: float, collector: str, *, on_first: bool) -> tuple[float, float]:
    """Return by what part the service that measures makes fewer turns, and takes more CPU for one."""
    ports = (PORT, PORT + 10) if on_first else (PORT + 10, PORT)
    with running(folder / "on", ports[0], load, collector) as on, running(folder / "off", ports[1], load, None) as off:
        scraped, begun_at = 0, time.monotonic()
        while time.monotonic() - begun_at < WARM_UP_S + seconds:
            if scraped == int(WARM_UP_S / SCRAPE_S):
                on.begin()
                off.begin()
            scraped += 1
            on.http.get("/metrics").raise_for_status()
            time.sleep(max(0.0, begun_at + scraped * SCRAPE_S - time.monotonic()))
        (on_rate, on_ms), (off_rate, off_ms) = (on.measure(), off.measure()) if on_first else _swapped(on, off)
    print(
        f"{load}: with {on_rate:6.1f} turns/s, {on_ms:5.2f} ms of CPU a turn;"
        f" without {off_rate:6.1f} turns/s, {off_ms:5.2f} ms: {on_rate / off_rate:.3f} of the turns",
        flush=True,
    )
    return on_rate / off_rate, on_ms / off_ms


def _swapped(on: Service, off: Service) -> tuple[tuple[float, float], tuple[float, float]]:
    last = off.measure()
    return on.measure(), last


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--load", choices=LOADS)
    options = parser.parse_args()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{collector.server_port}"
        for load in [options.load] if options.load else LOADS:
            ratios = []
            for number in range(options.rounds):
                with tempfile.TemporaryDirectory() as folder:
                    on_first = number % 2 == 0
                    ratios.append(play(Path(folder), load, options.seconds, address, on_first=on_first))
            turns, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
            bound = f" (bound {BOUND})" if load == "paced" else ""
            print(f"{load}: {turns:.3f} of the turns a second{bound}, {cpu:.2f} times the CPU a turn;"
                  f" {Collector.taken / 1e6:.1f} MB of spans")  # fmt: skip
        collector.shutdown()


if __name__ == "__main__":
    main()
