"""Nodes as one Slurm job: a task on each of its machines."""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from service.cluster.failure import ClusterFailed
from service.cluster.machine import DRAIN_MORE_S, HURRY_S
from service.cluster.order import PRIVATE, ClusterOrder
from service.cluster.place import call, check_done
from workers.files.atomic import replace_file

ASK_S: Final = 60.0  # for an answer of Slurm's controller
LOOK_S: Final = 1.0
SCRIPT: Final = "slurm.sh"
GONE: Final = "ended"
RUNNING: Final = "running"
# A SIGTERM to srun would kill the nodes at once, and one to the job's tasks would reach the engines too. So ``cluster``
# stops the nodes on each machine. The first wait ends with the signal, the second with the nodes.
BATCH: Final = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@{grace_s}
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
unset SLURM_EXPORT_ENV
srun --kill-on-bad-exit=0 --wait=0 --label {command} &
nodes=$!
# shellcheck disable=SC2329
drain() {{ srun --overlap --ntasks-per-node=1 {stop} & }}
trap drain TERM INT
status=0
wait "$nodes" || status=$?
trap - TERM INT
if kill -0 "$nodes" 2>/dev/null; then
  status=0
  wait "$nodes" || status=$?
fi
exit "$status"
"""


class SlurmPlace:
    """One job of Slurm; ``options`` are sbatch's."""

    def __init__(self, folder: Path, order: ClusterOrder) -> None:
        self._folder = folder
        self._order = order

    def __repr__(self) -> str:
        return f"<SlurmPlace of job {self._order.job}>"

    def start(self) -> ClusterOrder:
        """Submit the job, unless it waits or runs."""
        if self._state() != GONE:
            return self._order
        command = [*self._order.command, "cluster", "node", "--home", str(self._folder)]
        grace_s = int(self._order.drain_s + DRAIN_MORE_S)
        stop = [*self._order.command, "cluster", "machine", "stop", "--home", str(self._folder)]
        script = BATCH.format(
            name=self._name,
            nodes=self._order.nodes,
            grace_s=grace_s,
            command=shlex.join(command),
            stop=shlex.join(stop),
        )
        replace_file(self._folder / SCRIPT, script.encode(), PRIVATE)
        log = f"--output={self._folder / 'slurm-%j.log'}"
        words = ["sbatch", log, *self._order.options, str(self._folder / SCRIPT)]
        check_done(call(words, self._order, ASK_S), "sbatch")
        return self._order

    def describe(self) -> Mapping[str, str]:
        """Return the state of the job."""
        return {self._name: self._state()}

    def stop(self) -> Mapping[str, str]:
        """Have Slurm signal the job's nodes, which drain; end what is left after their time."""
        limits_s = (self._order.drain_s + DRAIN_MORE_S, HURRY_S + ASK_S)
        for way, limit_s in zip((["--batch", "--signal=TERM"], []), limits_s, strict=True):
            state = self._state()
            if state == GONE:
                break
            if way and not state.startswith(RUNNING):
                continue  # there is no script yet to signal, and scancel would wait for it
            call(["scancel", *way, "--name", self._name], self._order, ASK_S)
            end = time.monotonic() + limit_s
            while self._state() != GONE and time.monotonic() < end:
                time.sleep(LOOK_S)
        if (state := self._state()) != GONE:
            raise ClusterFailed(f"the job {self._name} is still there: {state}")
        return {self._name: GONE}

    @property
    def _name(self) -> str:
        """The name of the job; its number is not known before sbatch has answered."""
        return f"roundhouse-{self._order.mark}"

    def _state(self) -> str:
        """Return the state of the job, its machines, and why it waits; ``ended`` once Slurm's queue lacks it."""
        words = ["squeue", "--noheader", "--name", self._name, "--format=%i|%T|%N|%r"]
        found = check_done(call(words, self._order, ASK_S), "squeue").strip().splitlines()
        if not found:
            return GONE
        job, state, machines, why = [*found[0].split("|"), "", "", ""][:4]
        return ", ".join(filter(None, (state.lower(), f"job {job}", machines, "" if why == "None" else why)))
