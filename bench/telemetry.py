"""The cost of telemetry: turns per second, and CPU per turn, beside a service that measures nothing.

Both run at the same time under the same load, so that other work on the machine slows both. One is scraped each second,
sends its spans to a receiver here, and logs JSON; the other counts nothing. They swap in every second round.
The bound: at most 2 % of throughput.

    python -m bench.telemetry [--rounds N] [--seconds S] [--load paced | flat-out]
"""

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from bench.parts.services import cpu_s, process_of, serving
from tests.harness.ports import find_ports
from tests.harness.service import Service, scripted_model

PORT: Final = find_ports(11)
SERVE: Final = "from service.cli.main import main; main()"
# Counts at a turn's end go, which no configuration can switch off.
NOTHING: Final = "from service.telemetry.telemetry import Telemetry as T; T.take = lambda self, facts: None; "
SLOTS: Final = 16
# 16 slots of 50 tokens a second each, or answers so short that the service is the busy part.
LOADS: Final[dict[str, dict[str, Any]]] = {
    "paced": {"tokens": 32, "interval": 0.02},
    "flat-out": {"tokens": 2, "interval": 0.001},
}
SCRAPE_S: Final = 1.0
WARM_UP_S: Final = 4.0
WAVE_LOOK_S: Final = 0.02
WAVE_LOOKS: Final = 100
QUIET_LOOKS: Final = 5
BOUND: Final = 0.98
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class Collector(BaseHTTPRequestHandler):
    """Receives spans and drops them."""

    taken = 0

    def do_POST(self) -> None:
        """Take a request's spans."""
        type(self).taken += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Loaded:
    """One service under load, with its progress since ``begin``."""

    def __init__(self, service: Service, *, is_paced: bool) -> None:
        self.service = service
        self._process = process_of(service)
        self._is_paced = is_paced

    def begin(self) -> None:
        """Measure from now on."""
        self._first_wave = self._wave() if self._is_paced else (self._ended(), time.monotonic())
        self._cpu, self._turns = cpu_s(self._process), self._ended()

    def measure(self) -> tuple[float, float]:
        """Return turns per second, and milliseconds of CPU per turn."""
        used_s = max(TICK_S, cpu_s(self._process) - self._cpu)  # the kernel counts in ticks: never 0
        cpu_ms = 1000 * used_s / max(1, self._ended() - self._turns)
        turns, at = self._wave() if self._is_paced else (self._ended(), time.monotonic())
        return (turns - self._first_wave[0]) / (at - self._first_wave[1]), cpu_ms

    def _wave(self) -> tuple[int, float]:
        """Return the number of ended turns just after all slots have ended theirs, and the time.

        Paced slots end their turns together, so a count between two waves would miss up to a wave. Slots that have
        drifted apart have no waves, and any moment will do.
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

    def _ended(self) -> int:
        (job,) = self.service.get("/v1/jobs")["jobs"]
        return int(job["progress"]["turns"]["completed"])


@contextlib.contextmanager
def running(port: int, load: str, collector: str | None) -> Iterator[Loaded]:
    """Run a service under load for a block; with a ``collector`` everything is on."""
    model = scripted_model(port + 1, slots=SLOTS, **LOADS[load])
    code = SERVE if collector else NOTHING + SERVE
    agents = [{"id": f"a{number}", "model": "m"} for number in range(3)]
    with serving(
        port,
        {"m": model},
        {"log": "json" if collector else "text"},
        command=(sys.executable, "-c", code),
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector or ""},
        telemetry={"traces": collector is not None},
    ) as service:
        service.post_job({"rounds": 100, "agents": agents, "conversations": [{"prompt": "Go."}] * 200})
        yield Loaded(service, is_paced=load == "paced")


def play(load: str, seconds: float, collector: str, *, on_first: bool) -> tuple[float, float]:
    """Return the measuring service's ratios to the other: turns per second, and CPU per turn."""
    ports = (PORT, PORT + 10) if on_first else (PORT + 10, PORT)
    with running(ports[0], load, collector) as on, running(ports[1], load, None) as off:
        scraped, begun_at = 0, time.monotonic()
        while time.monotonic() - begun_at < WARM_UP_S + seconds:
            if scraped == int(WARM_UP_S / SCRAPE_S):
                on.begin()
                off.begin()
            scraped += 1
            on.service.http.get("/metrics").raise_for_status()
            time.sleep(max(0.0, begun_at + scraped * SCRAPE_S - time.monotonic()))
        (on_rate, on_ms), (off_rate, off_ms) = (on.measure(), off.measure()) if on_first else _swapped(on, off)
    print(
        f"{load}: with {on_rate:6.1f} turns/s, {on_ms:5.2f} ms of CPU a turn;"
        f" without {off_rate:6.1f} turns/s, {off_ms:5.2f} ms: {on_rate / off_rate:.3f} of the turns",
        flush=True,
    )
    return on_rate / off_rate, on_ms / off_ms


def _swapped(on: Loaded, off: Loaded) -> tuple[tuple[float, float], tuple[float, float]]:
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
            ratios = [
                play(load, options.seconds, address, on_first=number % 2 == 0) for number in range(options.rounds)
            ]
            turns, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
            bound = f" (bound {BOUND})" if load == "paced" else ""
            print(f"{load}: {turns:.3f} of the turns a second{bound}, {cpu:.2f} times the CPU a turn;"
                  f" {Collector.taken / 1e6:.1f} MB of spans")  # fmt: skip
        collector.shutdown()


if __name__ == "__main__":
    main()
