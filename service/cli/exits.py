"""The exit status of the command (specification, "Exit codes")."""

from enum import IntEnum


class Exit(IntEnum):
    """The exit status of a command."""

    DONE = 0
    FAILED = 1  # the job failed or ended with failures
    USAGE = 2  # wrong usage, configuration or job file
    SERVICE = 3  # the service is not reachable or refused
    ENGINE = 4  # an engine could not be started
    INTERRUPTED = 130
