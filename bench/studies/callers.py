"""The cost of ten thousand conversations that wait for callers: memory, restart, and the time of a caller's words.

python -m bench.studies.callers [--conversations N] [--words N]
"""

import argparse
import statistics
import time

from bench.parts.services import process_of, serving
from tests.harness.ports import find_ports
from tests.harness.service import Service, scripted_model

PORT = find_ports(4)
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
    model = scripted_model(PORT + 1, slots=SLOTS, tokens=20, interval=TURN_S / 20)
    with serving(PORT, {"m": model}) as service:
        service.stop()
        measure(service, options.conversations, options.words)


def measure(service: Service, conversations: int, words: int) -> None:
    """Measure one service three times: without callers, with all of them, and under load."""
    empty_s = start(service)
    empty = rested(service)
    job = {"agents": AGENTS, "conversations": [{"prompt": "Go on."}] * conversations}
    began_at = time.monotonic()
    job_id = service.post_job(job)
    while service.get(f"/v1/jobs/{job_id}")["progress"]["turns"]["awaited"] < conversations:
        time.sleep(0.2)
    awaited_s = time.monotonic() - began_at
    service.stop()
    full_s = start(service)
    full = rested(service)
    print(f"{conversations} conversations are awaited {awaited_s:.1f} s after their post")
    print(f"{(full - empty) / conversations:.0f} bytes each of the service's memory after a restart (bound 200)")
    print(f"a restart takes {full_s:.2f} s, without them {empty_s:.2f} s (bound: 2 s with them)")
    busy = {"agents": [{"id": "ann", "model": "m"}], "rounds": 1000, "conversations": [{"prompt": "Go."}]}
    for _ in range(SLOTS):  # spread, as callers are: turns do not all end at one moment
        service.post_job(busy)
        time.sleep(TURN_S / SLOTS)
    time.sleep(REST_S)
    took = []
    for number in range(min(words, conversations)):
        path = f"/v1/jobs/{job_id}/conversations/c{number}/turns/guest/0"
        asked_at = time.perf_counter()
        assert service.http.post(path, json={"text": "Hello."}).status_code == 201
        took.append(1000 * (time.perf_counter() - asked_at))
    p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
    print(f"a post while {SLOTS} slots work: median {p50:.1f} ms, p99 {p99:.1f} ms (bound 20 ms)")


def start(service: Service) -> float:
    """Start the service; return the seconds until every model is ready and it lists the turns that wait for callers."""
    began_at = time.monotonic()
    service.start()
    service.get("/v1/awaited")
    return time.monotonic() - began_at


def rested(service: Service) -> int:
    """Return the memory of a service after a rest, in bytes."""
    time.sleep(REST_S)
    return int(process_of(service).memory_info().rss)


if __name__ == "__main__":
    main()
