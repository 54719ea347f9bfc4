"""The distribution that this program is installed as, and the one that it was called before."""

from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Final

NAME: Final = "roundhouse-llm"
FORMER_NAME: Final = "roundhouse"
COMMAND: Final = "service.cli.main:main"


def own_version() -> str:
    """Return the version of Roundhouse."""
    return version(NAME)


def former_version() -> str | None:
    """Return the version of a Roundhouse that is installed under its former name; another project's has that name now.

    It brings the same files: whoever uninstalls it takes ours away with it.
    """
    try:
        former = distribution(FORMER_NAME)
    except PackageNotFoundError:
        return None
    is_ours = any(point.value == COMMAND for point in former.entry_points)
    return former.version if is_ours else None
