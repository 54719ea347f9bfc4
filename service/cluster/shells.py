"""Nodes on machines that a user reaches: this one, or others over ssh."""

import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from service.cluster.failure import ClusterFailed
from service.cluster.machine import DRAIN_MORE_S, HURRY_S, SERVE_S, nodes_here, start_nodes, stop_nodes
from service.cluster.order import FILE, ClusterOrder
from service.cluster.place import call, check_done

CONNECT_S: Final = 20.0
SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S:.0f}")
T = TypeVar("T")


class HerePlace:
    """All nodes on this machine, each with ports and a folder of its own."""

    def __init__(self, folder: Path, order: ClusterOrder) -> None:
        self._folder = folder
        self._order = order

    def __repr__(self) -> str:
        return f"<HerePlace in {self._folder}>"

    def start(self) -> ClusterOrder:
        """Start the nodes that do not run."""
        start_nodes(self._folder, self._order, self._order.nodes)
        return self._order

    def describe(self) -> Mapping[str, str]:
        """Return the state of this machine."""
        return {"this machine": f"{len(nodes_here(self._folder, self._order))} of {self._order.nodes} nodes run"}

    def stop(self) -> Mapping[str, str]:
        """Drain and end all nodes."""
        ended = stop_nodes(self._folder, self._order)
        return {f"node {number}": how for number, how in ended.items()}


class SshPlace:
    """A node on each of the machines that ``address`` names, separated by commas; one named twice gets two."""

    def __init__(self, folder: Path, order: ClusterOrder) -> None:
        self._folder = folder
        self._order = order
        machines = [each.strip() for each in (order.address or "").split(",") if each.strip()]
        self._machines = Counter(machines[: order.nodes])

    def __repr__(self) -> str:
        return f"<SshPlace of {', '.join(self._machines)}>"

    def start(self) -> ClusterOrder:
        """Start the nodes that do not run, on all machines at once."""
        order = msgspec.json.encode(self._order)

        def start_on(machine: str) -> None:
            address = self._host_name(machine)
            count = self._machines[machine]
            words = f"start --count {count} --address {shlex.quote(address)}"
            home = shlex.quote(str(self._folder))
            # Machines may share the folder: each writes a file of its own before it takes its place.
            enter = f"umask 077 && mkdir -p {home} && cd {home}"
            take = f'{enter} && half=$(mktemp ./order.XXXXXX) && cat > "$half" && mv "$half" {FILE}'
            done = self._run(machine, f"{take} && {self._command(words)}", SERVE_S + 2 * CONNECT_S, order)
            check_done(done, machine)

        self._on_all(start_on)
        return self._order

    def describe(self) -> Mapping[str, str]:
        """Return the state of each machine."""

        def look_at(machine: str) -> str:
            done = self._run(machine, self._command("look"), 2 * CONNECT_S)
            return (done.stdout if done.returncode == 0 else done.stderr).strip()

        return self._on_all(look_at)

    def stop(self) -> Mapping[str, str]:
        """Drain and end all nodes, on all machines at once; the order is deleted there."""
        limit_s = self._order.drain_s + DRAIN_MORE_S + 2 * (HURRY_S + CONNECT_S)

        def stop_on(machine: str) -> str:
            return check_done(self._run(machine, self._command("stop"), limit_s), machine).strip()

        try:
            return self._on_all(stop_on)
        finally:  # machines may share the folder, so no order goes before all have read it
            order = shlex.quote(str(self._folder / FILE))
            with suppress(ClusterFailed):  # a machine that does not answer has been named
                self._on_all(lambda machine: self._run(machine, f"rm -f {order}", 2 * CONNECT_S))

    def _command(self, words: str) -> str:
        return f"{shlex.join(self._order.command)} cluster machine {words} --home {shlex.quote(str(self._folder))}"

    def _run(self, machine: str, script: str, limit_s: float, given: bytes = b"") -> "subprocess.CompletedProcess[str]":
        return call([*SSH, *self._order.options, "--", machine, script], self._order, limit_s, given)

    def _host_name(self, machine: str) -> str:
        """Return the host of a machine, which may be an alias of the user's ssh configuration."""
        shown = check_done(call(["ssh", *self._order.options, "-G", "--", machine], self._order, CONNECT_S), machine)
        found = (line.split() for line in shown.splitlines())
        return next((words[1] for words in found if words[:1] == ["hostname"] and len(words) > 1), machine)

    def _on_all(self, act: Callable[[str], T]) -> dict[str, T]:
        """Act on all machines at once.

        Raises:
            ClusterFailed: with every machine's fault.
        """
        faults, results = list[str](), dict[str, T]()
        with ThreadPoolExecutor(max_workers=max(1, len(self._machines))) as pool:
            for machine, task in {machine: pool.submit(act, machine) for machine in self._machines}.items():
                try:
                    results[machine] = task.result()
                except ClusterFailed as error:
                    faults.append(str(error))
        if faults:
            done = [f"{machine}: {result}" for machine, result in results.items() if isinstance(result, str)]
            raise ClusterFailed("\n".join([*done, *faults]))
        return results
