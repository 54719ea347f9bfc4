"""The conventions of all commands: their exit status (specification, "Exit codes"), and their groups in ``--help``."""

import os
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from service.formats.result_form import ResultForm

PARENT: Final = "ROUNDHOUSE_PARENT"  # in the environment of a service: the process whose own it is


def state_home() -> Path:
    """Return the folder of what Roundhouse keeps for a user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "roundhouse"


class Exit(IntEnum):
    """The exit status of a command."""

    DONE = 0
    FAILED = 1  # the job failed or ended with failures
    USAGE = 2  # wrong usage, configuration or job file
    SERVICE = 3  # the service is not reachable or refused
    ENGINE = 4  # an engine could not be started
    INTERRUPTED = 130


FormOption = Annotated[ResultForm | None, typer.Option("--format", help="The whole result in this form, as over HTTP.")]


class Panel(StrEnum):
    """The group of a command in ``--help``."""

    RUN = "Run here"
    JOBS = "Jobs of a running service"
    LOOK = "Look"
    OPERATE = "Operate"
