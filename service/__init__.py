"""Jobs, conversations, scheduling, storage, configuration, the HTTP surface and the terminal."""

from importlib.metadata import version

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Look the version up where it is asked for: ``service.client`` is used where nothing is installed of us."""
    if name == "__version__":
        return version("roundhouse")
    raise AttributeError(name)
