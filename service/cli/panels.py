"""The groups that ``roundhouse --help`` shows its commands in."""

from enum import StrEnum


class Panel(StrEnum):
    """What commands are for."""

    RUN = "Run here"
    JOBS = "Jobs of a running service"
    LOOK = "Look"
    OPERATE = "Operate"
