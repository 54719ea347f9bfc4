"""The groups that ``roundhouse --help`` shows its commands in."""

from enum import StrEnum


class Panel(StrEnum):
    """The group of a command in ``--help``."""

    RUN = "Run here"
    JOBS = "Jobs of a running service"
    LOOK = "Look"
    OPERATE = "Operate"
