"""The number of model swaps, beside a policy that knows the future (Belady) and one that does not (LRU).

Requests for several models arrive at fewer lanes, in virtual time, with a service's own decisions
(``workers.policy.placement``). Belady and LRU serve strictly in order of arrival.

python -m bench.studies.swaps [--requests 10000] [--models 6] [--lanes 2] [--rate 1.0]
"""

import argparse
from statistics import mean

from tests.harness.lanes import Simulation, belady, lru, mixes
from workers.policy.placement import SwapRule


def main() -> None:
    """Print a line for each mix and rule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for kind, arrivals in mixes(options.requests, options.models, options.rate, options.seed):
        order = [model for _, model, _ in arrivals]
        least, usual = belady(order, options.lanes), lru(order, options.lanes)
        for rule in SwapRule:
            done = Simulation(arrivals, options.lanes, rule).run()
            waits = [wait for wait, _ in done.waits]
            print(
                f"{kind:8s} {rule:4s} swaps {done.swaps:6d}  Belady {done.swaps / least:5.2f} x  "
                f"LRU {done.swaps / usual:5.2f} x  waiting {mean(done.queued):8.1f}  wait mean {mean(waits):8.2f} s, "
                f"most {max(waits):8.2f} s, of the work before it {done.worst:5.2f} x"
            )


if __name__ == "__main__":
    main()
