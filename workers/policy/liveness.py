"""Whether a request in flight is alive, from the cheapest evidence to the most expensive. Pure.

Evidence of progress, in order of strength:

* the model's own: tokens, and further prompt progress;
* the engine's counters (/slots): any that rises vetoes a kill, for every request;
* a compiler below the engine vetoes too: the first request of its shape waits until its kernels are made;
* CPU ticks of an engine on the CPU veto while a batch may be running, up to a limit of their own: it reports nothing
  meanwhile, not even to a canary, and a batch may take minutes; but one that hangs may spin as well;
* answers to others veto, up to the same limit, if the server is attached and has not progressed with a request yet: it
  may silently hold back requests beyond its slots, with or without having sent headers;
* bytes without content of the model's (SSE comments) and a growing log are shown but decide nothing: a hung engine can
  ping and complain, and a healthy one can sleep.

A limit counts from the last progress. So weak evidence never saves or condemns for longer than the configured time.

Objects made for each request at each look are msgspec structs, like the events of the stream.
"""

from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Struct

QUIET_SHARE: Final = 0.25  # share of the limit after which a request is silent, and the engine is looked at
QUIET_MAX_S: Final = 5.0
VETO_LIMITS: Final = 3.0  # how many limits long progress of others may excuse a request without output
BUSY_FRESH_S: Final = 10.0  # several looks: one of them may come late
BUSY_CORES: Final = 0.25  # used by a tree that computes, on a shared machine; an idle one uses 0.05


class Verdict(StrEnum):
    """The verdict on a request in flight, by the evidence so far."""

    LOADING = "loading"  # the engine is not ready yet
    PREFILLING = "prefilling"  # the prompt is being read
    DECODING = "decoding"  # the answer is being written
    TOOL_WAIT = "tool_wait"  # its tools run; the engine owes nothing
    PAUSED = "paused"  # its engine is paused for new weights
    SILENT = "silent"  # no progress of its own, within the limit or with a sign of the engine's
    STALLED = "stalled"  # the limit has passed, and nothing speaks for it
    DEAD = "dead"  # its engine is gone


SEVERITY: Final = (
    *(Verdict.DEAD, Verdict.STALLED, Verdict.SILENT, Verdict.LOADING),
    *(Verdict.PAUSED, Verdict.PREFILLING, Verdict.TOOL_WAIT, Verdict.DECODING),
)


class Scope(StrEnum):
    """The subject of a stall."""

    ENGINE = "engine"  # the engine shows no progress
    REQUEST = "request"  # the engine works for others, and not for this one


class StallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that a model may make no progress, before and after the first token; None is for ever.

    ``busy_s`` is the extra time in which CPU ticks alone may speak for an engine, or others' answers for a request that
    an attached server may hold back.
    """

    prefill_s: float | None = 120.0
    decode_s: float | None = 60.0
    busy_s: float = 0.0


class RequestObservations(Struct, frozen=True, kw_only=True, gc=False):
    """The known facts of one request that waits for its engine; times in monotonic seconds."""

    has_token: bool
    progress_at: float
    is_mute: bool = False  # it shows nothing before the whole answer
    has_begun: bool = True  # the model has shown progress with it
    is_passed_over: bool = False  # progress in the engine's slots is others'
    prefill_left_s: float = 0.0  # estimate for the rest of the prompt at the measured rate


class EngineObservations(Struct, frozen=True, kw_only=True, gc=False):
    """The known facts of the engine as a whole.

    ``rose_at`` is when a counter was last seen to rise; ``unexplained_at`` when more slots progressed than requests of
    ours did, so that a silent request may be in one of them; ``prefilling_at`` when another's prompt last progressed;
    ``batch_busy_at`` when its processes were last seen to compute while a batch may be running; ``answering_at`` when
    an attached server that may hold requests back last answered another.
    """

    is_serving: bool
    rose_at: float | None = None
    unexplained_at: float | None = None
    others_at: float | None = None
    prefilling_at: float | None = None
    batch_busy_at: float | None = None
    answering_at: float | None = None


class Judgement(Struct, frozen=True, kw_only=True, gc=False):
    """A verdict, the time without progress, and the limit on that; only a stall has a ``scope``."""

    verdict: Verdict
    silent_s: float
    limit_s: float | None
    scope: Scope | None = None


def judge(limits: StallLimits, request: RequestObservations, engine: EngineObservations, now: float) -> Judgement:
    """Judge one request."""
    limit_s = _limit_s(limits, request)
    silent_s = max(0.0, now - request.progress_at)
    if not engine.is_serving:
        return Judgement(verdict=Verdict.DEAD, silent_s=silent_s, limit_s=limit_s)
    if silent_s < quiet_s(limit_s):
        verdict = Verdict.DECODING if request.has_token else Verdict.PREFILLING
        return Judgement(verdict=verdict, silent_s=silent_s, limit_s=limit_s)
    if limit_s is None or silent_s < limit_s:
        return Judgement(verdict=Verdict.SILENT, silent_s=silent_s, limit_s=limit_s)
    if is_computing(engine.batch_busy_at, now) and silent_s < limit_s + limits.busy_s:
        return Judgement(verdict=Verdict.SILENT, silent_s=silent_s, limit_s=limit_s)
    if _may_be_queued(request, engine, now, limit_s) and silent_s < limit_s + limits.busy_s:
        return Judgement(verdict=Verdict.SILENT, silent_s=silent_s, limit_s=limit_s)
    scope = _stall_scope(request, engine, now, limit_s)
    verdict = Verdict.SILENT if scope is None else Verdict.STALLED
    return Judgement(verdict=verdict, silent_s=silent_s, limit_s=limit_s, scope=scope)


def is_computing(busy_at: float | None, now: float) -> bool:
    """Whether an engine was seen to compute so lately that it may still do."""
    return busy_at is not None and now - busy_at < BUSY_FRESH_S


def quiet_s(limit_s: float | None) -> float:
    """Return the time without progress after which the engine is looked at."""
    return QUIET_MAX_S if limit_s is None else min(QUIET_MAX_S, limit_s * QUIET_SHARE)


def _limit_s(limits: StallLimits, request: RequestObservations) -> float | None:
    if request.has_token:
        return limits.decode_s
    return None if limits.prefill_s is None else limits.prefill_s + request.prefill_left_s


def _may_be_queued(request: RequestObservations, engine: EngineObservations, now: float, limit_s: float) -> bool:
    """Whether a request without progress may wait behind others in the server.

    Ollama holds back requests beyond its slots without a byte; ``transformers serve`` and vLLM send the headers first.
    From the end of the one before, it has the whole limit, like any request that has begun.
    """
    return not request.has_begun and engine.answering_at is not None and now - engine.answering_at < limit_s


def _stall_scope(request: RequestObservations, engine: EngineObservations, now: float, limit_s: float) -> Scope | None:
    """Return the scope of a stall, or None if a sign of the engine's speaks for the request."""

    def is_fresh(at: float | None) -> bool:
        return at is not None and now - at < limit_s

    if not is_fresh(engine.rose_at) and not is_fresh(engine.others_at):
        return Scope.ENGINE
    is_lately = now - request.progress_at < VETO_LIMITS * limit_s
    if is_fresh(engine.unexplained_at) and (is_lately or (request.is_mute and not request.is_passed_over)):
        return None  # it may be in a slot that we cannot see
    if not request.has_token and is_fresh(engine.prefilling_at) and is_lately:
        return None  # another's prompt is read before its own
    return Scope.REQUEST if is_fresh(engine.others_at) or request.is_passed_over else None
