"""Errors as clients of OpenAI's and Anthropic's APIs expect them: one table of reasons, and a form for each API.

Source: specification, "Errors at the front door".
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response

from service.errors import ServiceError
from service.scheduling.keeping.request import RelayFailure
from workers.outcome import FailureReason

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
MODELS: Final = "/v1/models"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
NATIVE: Final = "/completion"  # llama.cpp's own
RERANK: Final = "/v1/rerank"
# Paths that count tokens or render texts: an engine needs no slot for them.
SLOTLESS: Final = (
    *("/tokenize", "/detokenize", "/apply-template"),
    *(f"{CHAT}/input_tokens", f"{RESPONSES}/input_tokens", f"{MESSAGES}/count_tokens"),
)
WRITING: Final = (CHAT, COMPLETIONS, NATIVE, RESPONSES, MESSAGES)  # answers are text; model parameters apply
PATHS: Final = (*WRITING, "/v1/embeddings", RERANK, "/v1/score", "/pooling", *SLOTLESS)
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {  # required fields of a body
    **dict.fromkeys((CHAT, f"{CHAT}/input_tokens", MESSAGES, f"{MESSAGES}/count_tokens"), ("messages",)),
}
# Unversioned paths of engines for the same.
ALIASES: Final[Mapping[str, str]] = {"/chat/completions": CHAT, "/rerank": RERANK, "/score": "/v1/score"}
SERVED: Final = frozenset({*PATHS, *ALIASES})
# The first parts of these APIs' paths; Roundhouse's own paths have none of them.
FAMILIES: Final = frozenset(
    {"chat", "completions", "embeddings", "messages", "responses"}  # these have served paths
    | {"assistants", "audio", "batches", "containers", "conversations", "evals", "files", "fine_tuning", "images"}
    | {"moderations", "organization", "realtime", "rerank", "score", "skills", "threads", "uploads", "vector_stores"}
    | {"videos"}
)
NO_RETRY: Final = {"x-should-retry": "false"}  # stock clients try three times on any status above 499

STATUS: Final[Mapping[str, int]] = {
    FailureReason.ENGINE_DIED: 502,
    FailureReason.ENGINE_UNREACHABLE: 503,
    FailureReason.ENGINE_REJECTED: 502,
    FailureReason.STALLED_PREFILL: 504,
    FailureReason.STALLED_DECODE: 504,
    FailureReason.REPEATED_LINE_LOOP: 500,
    FailureReason.CONTEXT_OVERFLOW: 400,
    FailureReason.CACHE_FULL: 503,
    FailureReason.DEADLINE: 504,
    FailureReason.POISONED: 500,
    FailureReason.WEIGHTS_CHANGED: 503,
    FailureReason.ADAPTER_UNLOADED: 404,
    FailureReason.CANCELLED: 503,
    FailureReason.SHUTDOWN: 503,
    FailureReason.INTERNAL: 500,
    "session_not_found": 404,
    "store_unavailable": 503,
    "queue_timeout": 503,
    "queue_full": 429,
}
OPENAI_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ClientError(msgspec.Struct, frozen=True, kw_only=True):
    """A failure as its client sees it; ``after_s`` is when to ask again, None is never."""

    status: int
    code: str
    message: str
    param: str | None = None
    after_s: int | None = None

    def document(self, path: str) -> dict[str, object]:
        """Return the error in the form of the path's API."""
        if path.startswith(MESSAGES):
            fallback = "invalid_request_error" if self.is_clients else "api_error"
            kind = ANTHROPIC_TYPES.get(self.status, fallback)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error" if self.is_clients else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def is_clients(self) -> bool:
        """Whether the request itself is at fault."""
        return self.status < HTTPStatus.INTERNAL_SERVER_ERROR

    def response(self, path: str, headers: Mapping[str, str]) -> Response:
        """Return the response in the form of the path's API."""
        advice = NO_RETRY if self.after_s is None else {"Retry-After": str(self.after_s)}
        content = msgspec.json.encode(self.document(path))
        return Response(content, self.status, {**headers, **advice}, media_type="application/json")

    def event(self, path: str) -> bytes:
        """Return the error event that ends a stream."""
        if path == RESPONSES:
            error = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
            return b"event: error\ndata: %s\n\n" % msgspec.json.encode(error)
        name = b"event: error\n" if path == MESSAGES else b""
        return b"%sdata: %s\n\n" % (name, msgspec.json.encode(self.document(path)))


def error_of_failure(failure: RelayFailure) -> ClientError:
    """Return the client's error for a failed request."""
    status = STATUS.get(failure.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    message = f"{failure.reason}: {failure.detail}"
    return ClientError(status=status, code=failure.reason, message=message, after_s=failure.after_s)


def error_of_service(error: ServiceError, param: str | None = None) -> ClientError:
    """Return the client's error for a refusal by the service."""
    return ClientError(
        status=error.status, code=error.code, message=str(error), param=param, after_s=error.retry_after_s
    )


def is_served(path: str) -> bool:
    """Whether a path is served, or belongs to none of these APIs."""
    return _family(path) not in FAMILIES or path in SERVED


def _family(path: str) -> str:
    return path.removeprefix("/v1/").partition("/")[0] if path.startswith("/v1/") else ""


def not_served(path: str) -> str:
    """Return the message for a path that is not served, with the path that may be meant."""
    meant = _without_slips(path)
    hint = f"; it serves {meant}" if meant != path and (meant in SERVED or meant == MODELS) else ""
    return f"Roundhouse does not serve {path}{hint}"


def _without_slips(path: str) -> str:
    """Return a path without the doubled slashes or versions of a wrong base URL."""
    plain = re.sub("/+", "/", path).rstrip("/")
    while plain.startswith("/v1/v1/"):
        plain = plain.removeprefix("/v1")
    return plain


def is_of_surface(path: str) -> bool:
    """Whether a path is of one of these APIs, served here or not: their clients know no other form of errors.

    The longer paths of a model's tools, adapters and weights are Roundhouse's own.
    """
    path = _without_slips(path)
    above, _, name = path.rpartition("/")
    return path in SERVED or _family(path) in FAMILIES or path == MODELS or (above == MODELS and bool(name))
