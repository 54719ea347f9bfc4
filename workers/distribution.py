"""The distribution that this program is installed as."""

from importlib.metadata import version
from typing import Final

NAME: Final = "roundhouse-llm"


def own_version() -> str:
    """Return the version of Roundhouse."""
    return version(NAME)
