"""The programs that benchmarks compare with, each in an environment of its own, as the engines of the tests are."""

from pathlib import Path
from typing import Final

from tests.engines.install import environment

PINS: Final = {"sglang-router": "sglang-router==0.3.2", "litellm": "litellm[proxy]==1.106.2"}


def rival_python(name: str) -> Path:
    """Return the Python that has a rival; it is set up where it is not there yet, in the user's cache folder."""
    return environment(name, PINS[name], [[PINS[name]]])
