"""What a hundred thousand queued conversations cost the whole service: memory, and turns a second beside a thousand's.

python -m bench.queued [--agents N]
"""

import argparse
import json
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
FEW, MANY, A_JOB = 1_000, 100_000, 10_000
SLOTS = 8
MEASURED_S = 20.0


def main() -> None:
    """Print memory and turns a second with many and with few."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1)
    agents = parser.parse_args().agents
    few_rate, few_mb = measure(FEW, agents)
    many_rate, many_mb = measure(MANY, agents)
    print(f"{agents} agents, {FEW} conversations: {few_rate:.0f} turns/s, {few_mb:.0f} MB")
    print(f"{agents} agents, {MANY} conversations: {many_rate:.0f} turns/s, {many_rate / few_rate:.2f} of those"
          f" (bound 0.90), {many_mb:.0f} MB (bound 500 MB)")  # fmt: skip


def measure(conversations: int, agents: int) -> tuple[float, float]:
    """Return turns a second and the most megabytes of the service while conversations wait, which ever come back."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = {
            "engine": "llama-server", "command": [sys.executable, "-I", "-S", str(ENGINE)],
            "args": {"tokens": 2, "interval": 0.02}, "port": PORT + 1, "slots": SLOTS,
        }  # fmt: skip
        config = {"server": {"port": PORT, "state_dir": str(folder / "state")}, "models": {"m": model}}
        (folder / "config.yaml").write_text(json.dumps(config))
        serve = [ROUNDHOUSE, "serve", "--config", str(folder / "config.yaml")]
        with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as service:
            try:
                return _measure(psutil.Process(service.pid), conversations, agents)
            finally:
                service.kill()


def _measure(service: psutil.Process, conversations: int, agents: int) -> tuple[float, float]:
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120, trust_env=False) as http:
        _until_ready(http)
        job = {
            "rounds": 48 // agents,
            "agents": [{"id": f"a{number}", "model": "m"} for number in range(agents)],
            "conversations": [{"prompt": "Go."}] * min(conversations, A_JOB),
        }
        for _ in range(max(1, conversations // A_JOB)):
            http.post("/v1/jobs", json=job).raise_for_status()
        time.sleep(MEASURED_S / 2)  # until the facts of the admission are written
        before, began_at = _ended(http), time.monotonic()
        most = 0.0
        while time.monotonic() - began_at < MEASURED_S:
            most = max(most, service.memory_info().rss / 1e6)
            time.sleep(0.5)
        rate = (_ended(http) - before) / (time.monotonic() - began_at)
    return rate, most


def _ended(http: httpx.Client) -> int:
    jobs = http.get("/v1/jobs", params={"limit": 100}).json()["jobs"]
    return sum(job["progress"]["turns"]["completed"] for job in jobs)


def _until_ready(http: httpx.Client) -> None:
    for _ in range(300):
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError("the service does not get ready")


if __name__ == "__main__":
    main()
