"""The work of a scheduler for a cluster, and the calls of its programs."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from service.cluster.failure import ClusterFailed
from service.cluster.order import ClusterOrder
from service.config.secrets import child_environment


class ClusterPlace(Protocol):
    """Starts, shows and ends the nodes of one order."""

    def start(self) -> ClusterOrder:
        """Start the nodes that do not run, and return the order with the scheduler's name for them.

        Raises:
            ClusterFailed: one cannot be started.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Return the state of each machine, or of each of the scheduler's parts.

        Raises:
            ClusterFailed: the scheduler does not answer.
        """
        ...

    def stop(self) -> Mapping[str, str]:
        """Drain and end all nodes, and return how each ended.

        Raises:
            ClusterFailed: some of them may run on.
        """
        ...


def call(
    command: Sequence[str], order: ClusterOrder, limit_s: float, given: bytes = b""
) -> "subprocess.CompletedProcess[str]":
    """Run a scheduler's program, without the variables that only nodes may know.

    Raises:
        ClusterFailed: it is not installed, or took longer than the limit.
    """
    words = list(command)
    if shutil.which(words[0]) is None:
        raise ClusterFailed(f"{words[0]} is not on the path of this machine")
    try:
        done = subprocess.run(
            words,
            input=given,
            capture_output=True,
            env=child_environment(order.environment.keys()),
            umask=0o077,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterFailed(f"{words[0]} did not end within {limit_s:g} s") from error
    return subprocess.CompletedProcess(
        words, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )


def check_done(done: "subprocess.CompletedProcess[str]", what: str) -> str:
    """Return a program's output.

    Raises:
        ClusterFailed: it failed; the message has its words.
    """
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise ClusterFailed(f"{what}: {words}")
    return done.stdout
