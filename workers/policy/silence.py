"""When a request in flight has been silent for too long. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class Silence(StrEnum):
    """Which limit a request has outrun; the values are the contract's reasons of failure."""

    PREFILL = "stalled_prefill"
    DECODE = "stalled_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """How long the engine may send no byte, in seconds, before and after the first token; None is for ever."""

    prefill_s: float | None = 120.0
    decode_s: float | None = 60.0


def judge(limits: SilenceLimits, *, last_byte_at: float, has_token: bool, now: float) -> Silence | None:
    """Return the limit that is outrun, if one is. Any byte is progress (seed 002, sections 11 and 12)."""
    limit_s = limits.decode_s if has_token else limits.prefill_s
    if limit_s is None or now - last_byte_at < limit_s:
        return None
    return Silence.DECODE if has_token else Silence.PREFILL
