"""Starts Roundhouse nodes under Ray: one on each of N machines, with the GPUs that Ray reserves there.

    python deploy/examples/ray_nodes.py --config /shared/roundhouse.yaml --nodes 3 --gpus 1

Ray places the nodes and gives each its GPUs (CUDA_VISIBLE_DEVICES). The configuration names PostgreSQL, so they share
one queue. Ctrl-C or SIGTERM drains all nodes. An actor restarts its node when it dies; its jobs continue meanwhile on
the others. If an actor is killed, its node gets SIGTERM from the kernel, and ends its engines.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.2
WATCH_S = 2.0
STARTS = 5  # failed starts of a node in a row before the driver gives up
STOP_S = 120.0  # more than drain_s and stop_grace_s together


def node_command(program: str, config: str, host: str, port: int, state_dir: str) -> list[str]:
    """Return the command of one node, which gets SIGTERM when its parent process is killed."""
    serve = [program, "serve", "--config", config, "--host", host, "--port", str(port), "--state-dir", state_dir]
    return ["setpriv", "--pdeathsig", "TERM", *serve]


def node_environment(environment: Mapping[str, str], api_keys: str) -> dict[str, str]:
    """Return a node's environment: the actor's, with the GPUs from Ray, and the driver's keys."""
    return {**environment, "ROUNDHOUSE_API_KEYS": api_keys}


class Node:
    """One node on this machine; an actor under Ray, a plain class without it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int) -> None:
        self._command = list(command)
        self._environment = node_environment(os.environ, environment["ROUNDHOUSE_API_KEYS"])
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def serve(self, limit_s: float) -> str:
        """Start the node unless it runs, and return its address once it serves.

        Raises:
            RuntimeError: it ended, or did not serve within ``limit_s``.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._command, env=self._environment)
        url = f"http://127.0.0.1:{self._port}/healthz"
        end = time.monotonic() + limit_s
        while not _answers(url):
            if self._process.poll() is not None:
                raise RuntimeError(f"the node ended with status {self._process.returncode}")
            if time.monotonic() > end:
                raise RuntimeError(f"the node did not serve within {limit_s:g} s")
            time.sleep(POLL_S)
        return f"http://{os.uname().nodename}:{self._port}"

    def stop(self) -> int:
        """Drain the node, and return its exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - our own address
            return True
    except (urllib.error.URLError, OSError):
        return False


def watch(nodes: Sequence[object], get: object, stop: threading.Event, start_s: float) -> None:
    """Restart dead nodes until ``stop``; ``get`` is Ray's.

    Raises:
        RuntimeError: a node failed to start ``STARTS`` times in a row.
    """
    failures = dict.fromkeys(range(len(nodes)), 0)
    while not stop.wait(WATCH_S):
        for number, node in enumerate(nodes):
            try:
                get(node.serve.remote(start_s))
                failures[number] = 0
            except Exception as error:
                failures[number] += 1
                print(f"node {number}: {error}", file=sys.stderr, flush=True)
                if failures[number] >= STARTS:
                    raise RuntimeError(f"node {number} cannot be started") from error


def main() -> None:
    """Place the nodes, print their addresses, and watch them until a signal."""
    options = arguments().parse_args()
    keys = os.environ.get("ROUNDHOUSE_API_KEYS") or sys.exit("set ROUNDHOUSE_API_KEYS: nodes listen for other machines")
    try:
        import ray  # noqa: PLC0415 - the classes above do not need it
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup  # noqa: PLC0415
    except ImportError:
        sys.exit("there is no Ray: pip install ray, in the environment that has Roundhouse")
    stop = threading.Event()
    ray.init(address=options.address, log_to_driver=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    needs = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
    group = ray.util.placement_group([needs] * options.nodes, strategy="STRICT_SPREAD")  # ports are per machine
    if not group.wait(options.start_s):
        sys.exit(f"Ray found no {options.nodes} machines with {needs} each within {options.start_s:g} s")
    command = node_command(options.program, options.config, "0.0.0.0", options.port, options.state_dir)  # noqa: S104
    actor = ray.remote(Node)
    nodes = [
        actor.options(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            max_restarts=-1,
            scheduling_strategy=InGroup(group, placement_group_bundle_index=number),
        ).remote(command, {"ROUNDHOUSE_API_KEYS": keys}, options.port)
        for number in range(options.nodes)
    ]
    try:
        for url in ray.get([node.serve.remote(options.start_s) for node in nodes]):
            print(url, flush=True)
        watch(nodes, ray.get, stop, options.start_s)
    finally:
        print(f"stopped with {[_stopped(node, ray.get) for node in nodes]}", flush=True)
        ray.shutdown()


def _stopped(node: object, get: object) -> int | str:
    """Return a node's exit status, or the error: one that does not answer must not keep the others running."""
    try:
        return get(node.stop.remote(), timeout=STOP_S)
    except Exception as error:  # noqa: BLE001 - Ray's, or the node's
        return str(error)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description="Starts Roundhouse nodes under Ray.")
    parser.add_argument("--config", required=True, help="the configuration, at the same path on every machine")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="of each node")
    parser.add_argument("--cpus", type=float, default=1, help="of each node")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--state-dir", default=str(Path.home() / ".roundhouse"), help="a local folder of each machine")
    parser.add_argument("--program", default=shutil.which("roundhouse") or "roundhouse")
    parser.add_argument("--address", default="auto", help="of the Ray cluster; local starts one here")
    parser.add_argument("--start-s", type=float, default=120, help="how long a node may take until it serves")
    return parser


if __name__ == "__main__":
    main()
