"""The conventions of all commands: their exit status (specification, "Exit codes"), and their groups in ``--help``."""

from enum import IntEnum, StrEnum
from typing import Final

PARENT: Final = "ROUNDHOUSE_PARENT"  # in the environment of a service: the process whose own it is


class Exit(IntEnum):
    """The exit status of a command."""

    DONE = 0
    FAILED = 1  # the job failed or ended with failures
    USAGE = 2  # wrong usage, configuration or job file
    SERVICE = 3  # the service is not reachable or refused
    ENGINE = 4  # an engine could not be started
    INTERRUPTED = 130


class Panel(StrEnum):
    """The group of a command in ``--help``."""

    RUN = "Run here"
    JOBS = "Jobs of a running service"
    LOOK = "Look"
    OPERATE = "Operate"
