"""Policies compared on engines with a virtual clock: makespan / lower bound, and mean completion / FIFO's.

python -m bench.studies.orders [--seeds N] [--rounds N]
"""

import argparse
from statistics import mean

from service.scheduling.core.policies import POLICIES
from tests.harness.simulation import Schedule, drawn, mixes, simulate

SLOTS = (4, 8, 32)


def main() -> None:
    """Print a line for each mix and number of slots, and the summary of each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    print(f"{'mix':20s} slots  " + "  ".join(f"{policy:>20s}" for policy in POLICIES))
    for name, jobs in mixes(rounds=options.rounds).items():
        for slots in SLOTS:
            runs = {
                policy: [simulate(jobs, slots, policy, drawn(seed)) for seed in range(options.seeds)]
                for policy in POLICIES
            }
            for policy, schedules in runs.items():
                ratios[policy].append(mean(schedule.ratio for schedule in schedules))
            told = "  ".join(f"{_told(runs[policy], runs['fifo']):>20s}" for policy in POLICIES)
            print(f"{name:20s} {slots:5d}  {told}", flush=True)
    for policy, told_ratios in ratios.items():
        print(f"{policy}: makespan / bound: mean {mean(told_ratios):.3f}, worst {max(told_ratios):.3f}")


def _told(schedules: list[Schedule], fifo: list[Schedule]) -> str:
    ratio = mean(schedule.ratio for schedule in schedules)
    completion = mean(ours.mean_completion / its.mean_completion for ours, its in zip(schedules, fifo, strict=True))
    return f"{ratio:.3f} / {completion:.2f}"


if __name__ == "__main__":
    main()
