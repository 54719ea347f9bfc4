"""Jobs, conversations, scheduling, storage, configuration, the HTTP API and the terminal."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from service.inference.event_log import INFER_DONE, INFER_START, replay
    from service.inference.failures import (
        AgentExists,
        EngineClosed,
        InferenceError,
        InferenceFailed,
        NoLane,
        UnknownAgent,
    )
    from service.inference.inference_engine import InferenceEngine, InferenceRequest

__all__ = [
    "INFER_DONE",
    "INFER_START",
    "AgentExists",
    "EngineClosed",
    "InferenceEngine",
    "InferenceError",
    "InferenceFailed",
    "InferenceRequest",
    "NoLane",
    "UnknownAgent",
    "__version__",
    "replay",
]
_HOMES: Final = {
    **dict.fromkeys(("InferenceEngine", "InferenceRequest"), "service.inference.inference_engine"),
    **dict.fromkeys(("INFER_DONE", "INFER_START", "replay"), "service.inference.event_log"),
    **dict.fromkeys(
        ("AgentExists", "EngineClosed", "InferenceError", "InferenceFailed", "NoLane", "UnknownAgent"),
        "service.inference.failures",
    ),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public object
    """Import a name when it is first read: most programs need few of them."""
    if name == "__version__":
        from workers.distribution import own_version  # noqa: PLC0415 - see above

        return own_version()
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(name)
