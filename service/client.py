"""The old place of the trainer's client: ``roundhouse_client.TrainerClient`` is the new one."""

import warnings
from typing import TYPE_CHECKING, Final

import roundhouse_client

if TYPE_CHECKING:
    from roundhouse_client import TrainerClient as WeightsClient
    from roundhouse_client import WeightsError

__all__ = ["WeightsClient", "WeightsError"]
MOVED: Final = {"WeightsClient": "TrainerClient", "WeightsError": "WeightsError"}


def __getattr__(name: str) -> object:
    """Return a name from its new place, and say where that is."""
    if name not in MOVED:
        raise AttributeError(name)
    text = f"service.client.{name} is now roundhouse_client.{MOVED[name]}"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return getattr(roundhouse_client, MOVED[name])
