"""Latency of /healthz while the service does work that once blocked its event loop, beside an idle service.

Bounds: 20 ms at the 99th percentile, 100 ms at worst, on a machine without other work.

    python -m bench.loop [--only LOAD ...]
"""

import argparse
from statistics import quantiles

from bench.parts.services import serving
from tests.harness.loads import LOADS, probing
from tests.harness.ports import find_ports
from tests.harness.service import scripted_model


def main() -> None:
    """Try every load on its own service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD")
    idle_s = 0.0
    for name in parser.parse_args().only:
        model = {"m": scripted_model(find_ports(1), slots=4, tokens=30)}
        with serving(find_ports(1), model) as service, probing(service) as probe:
            LOADS[name](service)
        p99 = quantiles(probe.latencies, n=100)[98]
        idle_s = idle_s or p99
        worst, held = max(probe.latencies), max(probe.busy)
        ratio = f"{p99 / idle_s:.1f} x idle"
        print(f"{name:22} p99 {p99 * 1e3:6.1f} ms ({ratio}), worst {worst * 1e3:6.1f} ms", end="; ")
        print(f"within one of {len(probe.busy)} the loop computed {held * 1e3:.1f} ms at most", flush=True)


if __name__ == "__main__":
    main()
