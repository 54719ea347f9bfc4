"""What others notice while the service does what has held up its event loop before: /healthz, beside an idle service.

Bounds: 20 ms at the 99th percentile, 100 ms at worst, on a machine that does nothing else.
"""

import tempfile
from pathlib import Path
from statistics import quantiles

from tests.harness.loads import LOADS, probing
from tests.harness.ports import find_ports
from tests.harness.service import scripted_model, serving


def main() -> None:
    """Try every load on a service of its own."""
    idle_s = 0.0
    for name, load in LOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = {"m": scripted_model(find_ports(1), slots=4, tokens=30)}
            with serving(Path(folder) / "service", find_ports(1), model) as service, probing(service) as probe:
                load(service)
        p99 = quantiles(probe.latencies, n=100)[98]
        idle_s = idle_s or p99
        worst, held = max(probe.latencies), max(probe.busy)
        ratio = f"{p99 / idle_s:.1f} x idle"
        print(f"{name:22} p99 {p99 * 1e3:6.1f} ms ({ratio}), worst {worst * 1e3:6.1f} ms", end="; ")
        print(f"within one of {len(probe.busy)} the loop computed {held * 1e3:.1f} ms at most", flush=True)


if __name__ == "__main__":
    main()
