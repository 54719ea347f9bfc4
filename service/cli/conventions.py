"""Conventions of all commands: exit statuses (specification, "Exit codes"), and groups in ``--help``."""

import os
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from service.formats.result_form import ResultForm

FILE: Final = "roundhouse.yaml"  # a folder's configuration
PARENT: Final = "ROUNDHOUSE_PARENT"  # variable with the process id of the command that owns a service


def state_home() -> Path:
    """Return the folder for Roundhouse's state of a user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "roundhouse"


class Exit(IntEnum):
    """The exit status of a command."""

    DONE = 0
    FAILED = 1  # the job failed or ended with failures
    USAGE = 2  # wrong usage, configuration or job file
    SERVICE = 3  # the service is not reachable or refused
    ENGINE = 4  # an engine could not be started
    INTERRUPTED = 130


FormOption = Annotated[ResultForm | None, typer.Option("--format", help="The whole result in this format.")]


class Panel(StrEnum):
    """The group of a command in ``--help``."""

    RUN = "Run here"
    JOBS = "Jobs of a running service"
    LOOK = "Look"
    OPERATE = "Operate"
