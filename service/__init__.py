"""Jobs, conversations, scheduling, storage, configuration, the HTTP surface and the terminal."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.inference.inference_engine import InferenceEngine, InferenceRequest

__all__ = ["InferenceEngine", "InferenceRequest", "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has that name
    """Look a name up where it is asked for: ``service.client`` is used where nothing is installed of us."""
    if name == "__version__":
        return version("roundhouse")
    if name in {"InferenceEngine", "InferenceRequest"}:
        return getattr(import_module("service.inference.inference_engine"), name)
    raise AttributeError(name)
