"""Jobs, conversations, scheduling, storage, configuration, the HTTP surface and the terminal."""

from importlib.metadata import version

__version__ = version("roundhouse")
