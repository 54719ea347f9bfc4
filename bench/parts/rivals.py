"""The programs that benchmarks compare with, each in its own environment, like the tests' engines."""

from pathlib import Path
from typing import Final

from tests.engines.install import LITELLM, environment

PINS: Final = {"sglang-router": "sglang-router==0.3.2", "litellm": LITELLM}


def rival_python(name: str) -> Path:
    """Return the Python of a rival's environment, which is set up in the user's cache folder if missing."""
    return environment(name, PINS[name], [[PINS[name]]])
