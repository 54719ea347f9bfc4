"""The cost of one scheduling decision with thousands of ready turns, and the memory of queued conversations.

python -m bench.decisions [--decisions N] [--queued N]
"""

import argparse
import gc
import resource
import time
import tracemalloc
from random import Random

from service.conversations.job.job import TurnKey
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from tests.harness.simulation import job_of

SLOTS = 64
READY = 10_000


def main() -> None:
    """Print a line for each policy and shape of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=5_000)
    parser.add_argument("--queued", type=int, default=100_000, help="conversations")
    options = parser.parse_args()
    for policy in POLICIES:
        for jobs in (1, 1_000, READY // 2):
            _time_decisions(policy, jobs, options.decisions)
    _weigh(options.queued)


def _time_decisions(policy: str, jobs: int, decisions: int) -> None:
    """Time ends of turns with ``READY`` turns of ``jobs`` jobs ready; each end makes another turn ready."""
    core = SchedulingCore(POLICIES[policy])
    core.handle(events.WorkerReady(worker="w", model="m", slots=SLOTS))
    chance, flying = Random(1), list[TurnKey]()
    each = READY // jobs // 2
    for number in range(jobs):
        made = job_of(f"j{number}", "moderator", [chance.randint(20, 40) for _ in range(max(1, each))])
        flying += _starts(core.handle(events.JobAdmitted(job=made)))
    gc.freeze()
    times = []
    for _ in range(decisions):
        key = flying.pop(chance.randrange(len(flying)))
        began_at = time.perf_counter()
        actions = core.handle(events.TurnCompleted(key=key, seconds=chance.expovariate(1)))
        times.append(time.perf_counter() - began_at)
        flying += _starts(actions)
    times.sort()
    p50, p99, worst = (1000 * times[int(share * (decisions - 1))] for share in (0.5, 0.99, 1.0))
    print(f"{policy:14s} {jobs:5d} jobs, {READY} ready: p50 {p50:.3f} ms, p99 {p99:.3f} ms, worst {worst:.3f} ms"
          " (bound: p99 1 ms)", flush=True)  # fmt: skip


def _weigh(conversations: int) -> None:
    """Measure the core's memory for queued conversations of three agents."""
    tracemalloc.start()
    core = SchedulingCore(POLICIES["critical_path"])
    began_at = time.perf_counter()
    for number in range(10):
        core.handle(events.JobAdmitted(job=job_of(f"j{number}", "moderator", [4] * (conversations // 10))))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{conversations} queued conversations: {held / 1e6:.0f} MB in the core, admitted in "
          f"{time.perf_counter() - began_at:.1f} s (traced; peak of this process {peak:.0f} MB)")  # fmt: skip


def _starts(actions: list[events.Action]) -> list[TurnKey]:
    return [action.key for action in actions if isinstance(action, events.StartTurn)]


if __name__ == "__main__":
    main()
