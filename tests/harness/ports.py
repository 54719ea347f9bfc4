"""Free ports of this machine, for tests and benchmarks that run side by side."""

import itertools
import os
import socket

# Each of pytest's processes has ports of its own, so a free one stays free until its engine takes it.
_PORTS = range(20000, 32000)
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = len(_PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_next_port = itertools.cycle(_PORTS[_WORKER * _SHARE + os.getpid() % (_SHARE // 2) : (_WORKER + 1) * _SHARE])


def find_ports(count: int) -> int:
    """Return the first of this many successive ports without a listener."""
    run: list[int] = []
    for port in itertools.islice(_next_port, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                run = []
                continue
        run.append(port)
        if len(run) == count:
            return run[0]
    raise RuntimeError("no free ports")
