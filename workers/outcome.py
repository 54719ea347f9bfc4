"""The ends of an engine's request, as values: none is an error of the caller."""

from enum import StrEnum

import msgspec


class FailureReason(StrEnum):
    """Why a request or a turn failed: one word each, the same everywhere (specification, "Failure reasons")."""

    ENGINE_DIED = "engine_died"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_REJECTED = "engine_rejected"
    STALLED_PREFILL = "stalled_prefill"
    STALLED_DECODE = "stalled_decode"
    REPEATED_LINE_LOOP = "repeated_line_loop"
    CONTEXT_OVERFLOW = "context_overflow"
    CACHE_FULL = "cache_full"  # ends an attempt; its turn runs again
    SLOT_LOST = "slot_lost"  # ends an attempt; its turn runs again
    TOOL_TIMEOUT = "tool_timeout"
    TOOL_EXCEPTION = "tool_exception"
    TOOL_ARGUMENTS = "tool_arguments"
    TOOL_RESULT = "tool_result"
    TOOL_UNKNOWN = "tool_unknown"
    TOOL_BUDGET = "tool_budget"
    INVALID_ANSWER = "invalid_answer"  # ends an attempt; its turn asks again
    VALIDATION_EXHAUSTED = "validation_exhausted"
    DEADLINE = "deadline"
    POISONED = "poisoned"
    WEIGHTS_CHANGED = "weights_changed"
    NOT_SAID = "not_said"  # ends a caller's turn
    ADAPTER_UNLOADED = "adapter_unloaded"
    CANCELLED = "cancelled"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


class CancelReason(StrEnum):
    """Why a request was ended while it ran."""

    CONVERSATION_ENDED = "cancelled"  # no caller wants the answer any more
    SHUTDOWN = "shutdown"
    LEASE_LOST = "lease_lost"  # another node may run it by now
    UPGRADE = "upgrade"  # the next program of this process runs it
    STORE_LOST = "store_lost"  # the records that it needs cannot be read
    CACHE_FULL = "cache_full"  # the KV cache that it shares has no room for it now
    SLOT_LOST = "slot_lost"  # its slot was lent while its tools ran, and the engine has gone since
    WEIGHTS = "weights"  # ended for new weights of its engine, in the mode ``abort``


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """The model has answered; ``finish_reason`` is the engine's word for why it stopped."""

    finish_reason: str


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine failed and the request did not: it may be tried again.

    ``brought_down`` says that the incarnation ended under this request, which may have caused it, unless
    ``is_outside``: a signal ended it that neither we nor the kernel's OOM killer sent. ``is_proved`` marks a refusal
    after which the same engine answered another request: the refusal is about this request. ``retry_after_s`` is the
    engine's own time to try again.
    """

    reason: FailureReason
    detail: str
    brought_down: bool
    is_outside: bool = False
    is_proved: bool = False
    retry_after_s: float | None = None


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The request itself cannot succeed: trying it again does not help."""

    reason: FailureReason
    detail: str


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The request was ended from outside."""

    reason: CancelReason


Outcome = Completed | EngineFailed | RequestFailed | Cancelled
