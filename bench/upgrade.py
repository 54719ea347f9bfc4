"""Upgrades in place under load: counts of engines, turns and connections, and gaps of ``/healthz``.

``python -m bench.upgrade [--times 100] [--limit-s 3600]``. Each gap has a bound: another service's time from start to
first answer, measured right before on the same machine, plus 0.3 s. Engines are scripted. Each upgrade is reported on
standard error; Ctrl-C, SIGTERM and the time limit end the run, with a report of the results so far.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.harness.ports import find_ports
from tests.harness.service import Service, debate, scripted_model, serving
from tests.harness.upgrade_stages import ORDER, STAGE_LIMIT_S, Stage, UpgradeWatch
from tests.harness.upgrades import Engine, engines_of, probing_health, upgrade, upgrades_of
from tests.harness.waiting import wait_for

MARGIN_S = 0.3
CONVERSATIONS, ROUNDS = 8, 3
OPEN_JOBS = 2  # enough to keep engines busy: more would only lengthen the end
SHOWN = (Stage.CHECK, Stage.DRAIN, Stage.IMPORT, Stage.ADOPT)


class OutOfTimeError(Exception):
    """The run must end."""


@dataclass(kw_only=True)
class Tally:
    """Results so far: a start before each upgrade, and the longest wait for ``/healthz`` in it, in seconds."""

    before: list[Engine]
    jobs: list[str] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # as the service reports them
    stages: list[dict[Stage, float]] = field(default_factory=list)
    faults: int = 0

    @property
    def done(self) -> int:
        """The number of upgrades."""
        return len(self.gaps)


def main() -> None:
    """Run the upgrades and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, _end)
    signal.setitimer(signal.ITIMER_REAL, options.limit_s)
    port, other = find_ports(4), find_ports(4)
    model = scripted_model(port + 1, replicas=2, slots=4, tokens=20, interval=0.05)
    with tempfile.TemporaryDirectory() as folder:

        def start_another(number: int) -> float:
            return _start_s(Path(folder) / f"start-{number}", other, {**model, "port": other + 1})

        with serving(Path(folder) / "upgraded", port, {"m": model}, {"drain_s": 0.5}) as service:
            tally = Tally(before=engines_of(service))
            try:
                while tally.done < options.times:
                    _upgrade_once(service, port, start_another, tally)
            except OutOfTimeError as error:
                print(f"ended early by {error}; jobs under way are waited for", file=sys.stderr, flush=True)
                _settle(service)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _tell(service, tally)


def _end(number: int, _frame: object) -> None:
    signal.signal(number, signal.default_int_handler)  # a second signal ends the run at once
    raise OutOfTimeError(signal.Signals(number).name)


def _start_s(folder: Path, port: int, model: dict[str, Any]) -> float:
    began_at = time.monotonic()
    service = Service(folder, port, {"m": model})
    try:
        service.start(ready=False, limit_s=STAGE_LIMIT_S)
        seconds = time.monotonic() - began_at
        service.stop()
        return seconds
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill()
        service.http.close()


def _upgrade_once(service: Service, port: int, start_another: Callable[[int], float], tally: Tally) -> None:
    start_s = start_another(tally.done)
    states = [service.get(f"/v1/jobs/{job}")["state"] for job in tally.jobs[-OPEN_JOBS:]]
    for _ in range(OPEN_JOBS - sum(state in ("queued", "running") for state in states)):
        tally.jobs.append(service.post_job(debate(conversations=CONVERSATIONS, rounds=ROUNDS)))
    watch, seen = UpgradeWatch(service), list[dict[Stage, float]]()
    watching = threading.Thread(target=lambda: seen.append(watch.follow(Stage.SERVE)), daemon=True)
    watching.start()
    with probing_health(port) as probed:
        now = upgrade(service)
    watching.join()
    tally.starts.append(start_s)
    tally.silences.append(max(probed.gaps))
    tally.faults += len(probed.faults)
    tally.stages.append(_spans(seen[0]))
    tally.gaps.append(now["last"]["seconds"])
    stages = ", ".join(f"{stage} {tally.stages[-1].get(stage, 0.0):.2f}" for stage in SHOWN)
    told = f"/healthz waited {tally.silences[-1]:.2f} s, a start took {start_s:.2f} s; {stages}"
    print(f"{tally.done}: {told}; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)


def _spans(seen: dict[Stage, float]) -> dict[Stage, float]:
    return {stage: seen[after] - seen[stage] for stage, after in pairwise(stage for stage in ORDER if stage in seen)}


def _settle(service: Service) -> None:
    """Return once the service has ended the interrupted upgrade."""
    wait_for(lambda: upgrades_of(service)["phase"] == "idle", "no upgrade is under way", STAGE_LIMIT_S)
    wait_for(lambda: service.http.get("/readyz").status_code == 200, "its engines are ready", STAGE_LIMIT_S)


def _tell(service: Service, tally: Tally) -> None:
    same = engines_of(service) == tally.before
    states = Counter(service.wait_ended(job, 600.0)["state"] for job in tally.jobs)
    lost, doubled, cut_off = _counted(service, tally.jobs)
    print(f"{tally.done} upgrades: engines' pids and start times unchanged: {same}; probes refused: {tally.faults}")
    print(f"jobs: {dict(states)}; turns lost: {lost}, doubled: {doubled}; attempts interrupted and rerun: {cut_off}")
    if not tally.done:
        return
    for stage in SHOWN:
        print(f"{stage}: {_spread([each[stage] for each in tally.stages if stage in each])}")
    print(f"from the exec to the next program's serving: {_spread(tally.gaps)}")
    pairs = list(zip(tally.silences, tally.starts, strict=False))
    within = sum(silence <= start_s + MARGIN_S for silence, start_s in pairs)
    print(f"a start of another service before each: {_spread(tally.starts)}")
    print(f"longest wait for /healthz in each: {_spread(tally.silences)}; within that start and {MARGIN_S} s: {within}")
    print(f"wait over start: median {statistics.median(silence / start_s for silence, start_s in pairs):.2f}")


def _counted(service: Service, jobs: list[str]) -> tuple[int, int, int]:
    """Return the numbers of missing turns, of turns with several completed attempts, and of interrupted attempts."""
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
    return f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s" if seconds else "not seen"


if __name__ == "__main__":
    main()
