"""The benefit of waiting for the worker with a warm cache, on engines with a virtual clock.

Turns take 5 s to write (lognormal), prompts grow by the line's tokens per round, and an engine reads uncached tokens at
1,000 per second. The rival takes any free slot at once.

python -m bench.studies.replicas [--seeds N]
"""

import argparse
from statistics import mean

from service.conversations.job.job import TurnKey
from tests.harness.simulation import Cache, Schedule, drawn, job_of, simulate

WRITE_S = 5.0
TOKEN_S = 0.001
ROUNDS = 8
POLICY = "critical_path"


def main() -> None:
    """Print a line for each growth of the prompts, number of workers and kind of job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    for growth in (100, 1000, 4000):
        for workers in (2, 4):
            for kind in ("moderator", "free"):
                runs = [_compare(kind, workers, growth, seed) for seed in range(options.seeds)]
                makespan = mean(ours.makespan / rival.makespan for ours, rival in runs)
                completion = mean(ours.mean_completion / rival.mean_completion for ours, rival in runs)
                worst = max(ours.makespan / rival.makespan for ours, rival in runs)
                print(f"{growth:5d} tokens a round, {workers} workers of 2 slots, {kind:9s}: makespan {makespan:.3f} of"
                      f" the rival's (worst {worst:.3f}), mean completion {completion:.3f}", flush=True)  # fmt: skip


def _compare(kind: str, workers: int, growth: int, seed: int) -> tuple[Schedule, Schedule]:
    jobs = [job_of(f"j{number}", kind, [ROUNDS]) for number in range(2 * workers)]
    written = drawn(seed)

    def tokens(key: TurnKey) -> int:
        return growth * (key.round + 1)

    def seconds(key: TurnKey) -> float:
        return WRITE_S * written(key)

    ours, rival = (
        simulate(jobs, 2, POLICY, seconds, workers=workers, cache=Cache(tokens, TOKEN_S, is_told=is_told))
        for is_told in (True, False)
    )
    return ours, rival


if __name__ == "__main__":
    main()
