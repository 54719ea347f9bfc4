"""Generation parameters that authors may not set: they would be ignored, or break Roundhouse's counts.

Source: specification, "Generation parameters".
"""

from collections.abc import Iterator, Mapping
from typing import Final

from transport.answer_bound import bounds_in

ONE_ANSWER: Final = "a turn is one answer; each further one would take a slot unseen"
OURS: Final = "Roundhouse sets it itself; leave it out"
FIXED: Final[Mapping[str, tuple[int | None, str]]] = {  # parameters with one allowed value, or none
    "n": (1, ONE_ANSWER),
    "n_cmpl": (1, ONE_ANSWER),  # llama.cpp's own name for it
    "id_slot": (-1, "which slot of an engine takes a turn is the engine's to say"),
    "model": (None, OURS),
    "messages": (None, OURS),
    "tools": (None, "an agent's tools stand beside its params"),
    "stream": (None, OURS),
    "stream_options": (None, OURS),
}
COUNTED: Final = frozenset({"n", "n_cmpl", "id_slot"})


def refuse_params(params: Mapping[str, object] | None) -> dict[str, object]:
    """Return parameters of one request; fields that Roundhouse sets itself are replaced later.

    Raises:
        TypeError: they are no mapping.
        ValueError: some would break the count of slots; the message names each.
    """
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"params: {params!r} is no mapping")
    counted = {name: value for name, value in (params or {}).items() if name in COUNTED}
    faults = "; ".join(f"params.{name}: {message}" for name, message in param_faults(counted))
    if faults:
        raise ValueError(faults)
    return dict(params or {})


def param_faults(params: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the refused parameters, each with the reason."""
    for name, (harmless, message) in FIXED.items():
        value = params.get(name)
        if value is not None and (value != harmless or isinstance(value, bool)):
            yield name, message
    first, *others = bounds_in(params) or [""]
    yield from ((name, f"{first} bounds the answer already; give one of both") for name in others)
