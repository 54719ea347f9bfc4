"""Upgrades in place under load: engines, turns and connections counted, and gaps of ``/healthz``.

``python -m bench.upgrade [--times 100]``. Beside each gap stands the bound: what another service takes from its start
to its first answer, measured right before on the same machine, and 0.3 s. Engines are scripted.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import find_ports
from tests.harness.service import Service, debate, scripted_model, serving
from tests.harness.upgrades import engines_of, probing_health, upgrade

MARGIN_S = 0.3
CONVERSATIONS, ROUNDS = 8, 3


def main() -> None:
    """Print what is measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=100)
    times = parser.parse_args().times
    port, other = find_ports(4), find_ports(4)
    model = scripted_model(port + 1, replicas=2, slots=4, tokens=20, interval=0.05)
    with tempfile.TemporaryDirectory() as folder:

        def start_another(number: int) -> float:
            return _start_s(Path(folder) / f"start-{number}", other, {**model, "port": other + 1})

        with serving(Path(folder) / "upgraded", port, {"m": model}, {"drain_s": 0.5}) as service:
            _upgrade_often(service, port, times, start_another)


def _start_s(folder: Path, port: int, model: dict[str, Any]) -> float:
    began_at = time.monotonic()
    service = Service(folder, port, {"m": model})
    try:
        service.start(ready=False)
        seconds = time.monotonic() - began_at
        service.stop()
        return seconds
    finally:
        service.http.close()


def _upgrade_often(service: Service, port: int, times: int, start_another: Callable[[int], float]) -> None:
    before, jobs, starts, gaps, longest, faults = engines_of(service), [], [], [], [], 0
    for number in range(times):
        starts.append(start_another(number))
        jobs.append(service.post_job(debate(conversations=CONVERSATIONS, rounds=ROUNDS)))
        with probing_health(port) as probed:
            now = upgrade(service)
        longest.append(max(probed.gaps))
        gaps.append(now["last"]["seconds"])
        faults += len(probed.faults)
    same = engines_of(service) == before
    states = Counter(service.wait_ended(job, 600.0)["state"] for job in jobs)
    lost, doubled, cut_off = _counted(service, jobs)
    print(f"{times} upgrades: engines' pids and start times unchanged: {same}; connections refused: {faults}")
    print(f"jobs: {dict(states)}; turns lost: {lost}, doubled: {doubled}; attempts cut off and asked again: {cut_off}")
    print(f"from the exec to the next program's serving: {_spread(gaps)}")
    within = sum(gap <= start_s + MARGIN_S for gap, start_s in zip(longest, starts, strict=True))
    print(f"a start of another service before each: {_spread(starts)}")
    print(f"longest wait for /healthz in each: {_spread(longest)}; within that start and {MARGIN_S} s: {within}")


def _counted(service: Service, jobs: list[str]) -> tuple[int, int, int]:
    """Return how many turns are missing, how many have more than one completed attempt, and attempts that were cut."""
    lost = doubled = cut_off = 0
    for job in jobs:
        for transcript in service.get(f"/v1/jobs/{job}/result")["conversations"]:
            turns = transcript["turns"]
            lost += 3 * ROUNDS - len({(turn["agent"], turn["round"]) for turn in turns if turn["state"] == "completed"})
            doubled += len(turns) - len({(turn["agent"], turn["round"]) for turn in turns})
            for turn in turns:
                outcomes = Counter(attempt["outcome"] for attempt in turn["attempts"])
                doubled += outcomes["completed"] > 1
                cut_off += len(turn["attempts"]) - outcomes["completed"]
    return lost, doubled, cut_off


def _spread(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"


if __name__ == "__main__":
    main()
