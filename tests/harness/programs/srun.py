"""Stands in for Slurm's ``srun`` on one machine: starts the command once per task, and passes SIGTERM on to each.

Options are read as srun reads them, and must be those of the example. ``SRUN_TASKS`` is the number of tasks. Each has
ports of its own, since they share a machine: ``ROUNDHOUSE_PORT`` and ``ENGINE_PORT`` count upward.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

KNOWN = {"--kill-on-bad-exit=0", "--wait=0", "--label"}


def main() -> None:
    """Run the tasks to their ends; the status is the largest of theirs."""
    arguments = sys.argv[1:]
    while arguments[0].startswith("--"):
        if arguments[0] not in KNOWN:
            sys.exit(f"srun: unrecognized option '{arguments[0]}'")
        del arguments[0]
    tasks = [subprocess.Popen(arguments, env=environment(number)) for number in range(int(os.environ["SRUN_TASKS"]))]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    sys.exit(max(task.wait() for task in tasks))


def environment(number: int) -> dict[str, str]:
    """Return the environment of one task."""
    ports = {name: str(int(os.environ[name]) + number) for name in ("ROUNDHOUSE_PORT", "ENGINE_PORT")}
    return {**os.environ, **ports, "SLURM_PROCID": str(number)}


if __name__ == "__main__":
    main()
