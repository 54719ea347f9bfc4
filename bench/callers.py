"""The cost to the service of ten thousand conversations that only callers can move, and how long their words take.

python -m bench.callers [--conversations N] [--words N]
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from tests.harness.ports import find_ports

PORT = find_ports(4)
ROUNDHOUSE = str(Path(sys.executable).parent / "roundhouse")
ENGINE = Path(__file__).parents[1] / "tests" / "harness" / "programs" / "engine.py"
SLOTS = 64
REST_S = 3.0
TURN_S = 1.0
AGENTS = [{"id": "guest", "by": "caller"}, {"id": "ann", "model": "m", "speak_after_within_round": ["guest"]}]


def main() -> None:
    """Print memory of each, how long a restart takes, and how long a caller's post does while all slots work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--words", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = {
            "engine": "llama-server", "command": [sys.executable, "-I", "-S", str(ENGINE)],
            "args": {"tokens": 20, "interval": TURN_S / 20}, "port": PORT + 1, "slots": SLOTS,
        }  # fmt: skip
        config = {"server": {"port": PORT, "state_dir": str(folder / "state")}, "models": {"m": model}}
        (folder / "config.yaml").write_text(json.dumps(config))
        measure(folder / "config.yaml", options.conversations, options.words)


def measure(config: Path, conversations: int, words: int) -> None:
    """Measure lives of one service: without any, with all of them, and under load."""
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120, trust_env=False) as http:
        service, empty_s = start(config, http)
        empty = rested(service)
        job = {"agents": AGENTS, "conversations": [{"prompt": "Go on."}] * conversations}
        began_at = time.monotonic()
        job_id = http.post("/v1/jobs", json=job).raise_for_status().json()["id"]
        while counts(http, job_id)["awaited"] < conversations:
            time.sleep(0.2)
        awaited_s = time.monotonic() - began_at
        stop(service)
        service, full_s = start(config, http)
        full = rested(service)
        print(f"{conversations} conversations are awaited {awaited_s:.1f} s after their post")
        print(f"{(full - empty) / conversations:.0f} bytes each of the service's memory after a restart (bound 200)")
        print(f"a restart takes {full_s:.2f} s, without them {empty_s:.2f} s (bound: 2 s with them)")
        busy = {"agents": [{"id": "ann", "model": "m"}], "rounds": 1000, "conversations": [{"prompt": "Go."}]}
        for _ in range(SLOTS):  # of many callers, whose turns do not all end at one moment
            http.post("/v1/jobs", json=busy).raise_for_status()
            time.sleep(TURN_S / SLOTS)
        time.sleep(REST_S)
        took = []
        for number in range(min(words, conversations)):
            path = f"/v1/jobs/{job_id}/conversations/c{number}/turns/guest/0"
            asked_at = time.perf_counter()
            assert http.post(path, json={"text": "Hello."}).status_code == 201
            took.append(1000 * (time.perf_counter() - asked_at))
        p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
        print(f"a post while {SLOTS} slots work: median {p50:.1f} ms, p99 {p99:.1f} ms (bound 20 ms)")
        stop(service)


def start(config: Path, http: httpx.Client) -> tuple[psutil.Popen, float]:
    """Start a life; return it, and the seconds until it answers what is awaited and every model is ready."""
    began_at = time.monotonic()
    service = psutil.Popen([ROUNDHOUSE, "serve", "--config", str(config)], stderr=subprocess.DEVNULL)
    while service.poll() is None:
        try:
            if http.get("/readyz").status_code == 200 and http.get("/v1/awaited").status_code == 200:
                return service, time.monotonic() - began_at
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise RuntimeError("the service has ended")


def stop(service: psutil.Popen) -> None:
    """End a life as an operator does."""
    service.send_signal(signal.SIGTERM)
    service.wait(60)


def rested(service: psutil.Popen) -> int:
    """Return the memory of a service that has had a moment, in bytes."""
    time.sleep(REST_S)
    return int(service.memory_info().rss)


def counts(http: httpx.Client, job_id: str) -> dict[str, int]:
    """Return the counts of a job's turns."""
    turns: dict[str, int] = http.get(f"/v1/jobs/{job_id}").json()["progress"]["turns"]
    return turns


if __name__ == "__main__":
    main()
