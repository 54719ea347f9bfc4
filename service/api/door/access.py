"""Callers' rights: the one table of routes and scopes, and a route's access to its caller.

``Gate`` puts the ``Caller`` into the request's state before the route is known; ``AccessCheck`` runs before every
route and looks it up in this table. A route that is missing here needs ``admin``. A HEAD counts as a GET.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Final

import msgspec
from fastapi import Depends, Request

from service.api.door.parameters import check_parameters
from service.api.errors.forms import SERVED
from service.api.errors.refusals import ScopeMissing, TooManyRequests
from service.conversations.callers import Caller, KeyScope

BURST_S: Final = 1.0  # a bucket holds what its rate gives in this time, at least one request
CALLER: Final = "caller"  # key in the state of an ASGI scope


class TokenBucket:
    """Holds at most the tokens of ``BURST_S``; it begins full."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * BURST_S)
        self._level = self._most
        self._at = now

    def __repr__(self) -> str:
        return f"<TokenBucket {self._level:.1f} of {self._most:g}>"

    def take_token(self, now: float) -> float:
        """Take a token and return 0, or take none and return the seconds until there is one."""
        self._level = min(self._most, self._level + (now - self._at) * self._per_s)
        self._at = now
        if self._level < 1:
            return (1 - self._level) / self._per_s
        self._level -= 1
        return 0.0


class Rates:
    """The buckets of all keys that have a rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str | None, TokenBucket] = {}

    def __repr__(self) -> str:
        return f"<Rates {self._buckets}>"

    def admit_submission(self, caller: Caller) -> float:
        """Count a caller's submission and return 0, or count none and return the seconds until it is allowed."""
        if caller.requests_per_s is None:
            return 0.0
        now = self._clock()
        bucket = self._buckets.setdefault(caller.name, TokenBucket(caller.requests_per_s, now))
        return bucket.take_token(now)


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The scope that a route needs; None is any key. Where it ``is_metered``, calls count for ``requests_per_s``."""

    scope: KeyScope | None
    is_metered: bool = False


_ANY: Final = Access(scope=None)
_READ: Final = Access(scope=KeyScope.READ)
_END: Final = Access(scope=KeyScope.SUBMIT)
_SUBMIT: Final = Access(scope=KeyScope.SUBMIT, is_metered=True)
_ADMIN: Final = Access(scope=KeyScope.ADMIN)

ROUTES: Final[Mapping[tuple[str, str], Access]] = {
    ("GET", "/"): _ANY,
    ("GET", "/web/{name:path}"): _ANY,
    ("GET", "/healthz"): _ANY,
    ("GET", "/readyz"): _ANY,
    ("GET", "/openapi.json"): _ANY,
    ("GET", "/metrics"): _READ,
    ("GET", "/v1/status"): _READ,
    ("GET", "/v1/speaking"): _READ,
    ("GET", "/v1/usage"): _READ,
    ("GET", "/v1/nodes"): _READ,
    ("GET", "/v1/spans"): _READ,
    ("GET", "/v1/upgrade"): _ADMIN,
    ("POST", "/v1/upgrade"): _ADMIN,
    ("POST", "/v1/config/reload"): _ADMIN,
    ("GET", "/v1/overview/events"): _READ,
    ("POST", "/v1/jobs"): _SUBMIT,
    ("GET", "/v1/jobs"): _READ,
    ("GET", "/v1/jobs/{job_id}"): _READ,
    ("GET", "/v1/jobs/{job_id}/events"): _READ,
    ("GET", "/v1/jobs/{job_id}/overview/events"): _READ,
    ("GET", "/v1/jobs/{job_id}/timeline"): _READ,
    ("GET", "/v1/jobs/{job_id}/result"): _READ,
    ("GET", "/v1/jobs/{job_id}/conversations/{conversation_id}"): _READ,
    ("GET", "/v1/jobs/{job_id}/conversations/{conversation_id}/turns/{agent}/{round_number}/prompt"): _READ,
    ("GET", "/v1/awaited"): _READ,
    ("GET", "/v1/jobs/{job_id}/awaited"): _READ,
    ("POST", "/v1/jobs/{job_id}/conversations/{conversation_id}/turns/{agent}/{round_number}"): _SUBMIT,
    ("GET", "/v1/jobs/{job_id}/rollouts"): _READ,
    ("POST", "/v1/jobs/{job_id}/rewards"): _SUBMIT,
    ("POST", "/v1/sessions"): _SUBMIT,
    ("GET", "/v1/sessions/{session_id}"): _READ,
    ("DELETE", "/v1/sessions/{session_id}"): _END,
    ("GET", "/v1/sessions/{session_id}/rollouts"): _READ,
    ("POST", "/v1/sessions/{session_id}/reward"): _SUBMIT,
    ("GET", "/v1/jobs/{job_id}/deliveries"): _READ,
    ("POST", "/v1/jobs/{job_id}/cancel"): _END,
    ("DELETE", "/v1/jobs/{job_id}"): _END,
    ("GET", "/v1/jobs/{job_id}/document"): _READ,
    ("GET", "/v1/jobs/{job_id}/conversations/{conversation_id}/place"): _READ,
    ("GET", "/v1/overview/history"): _READ,
    ("GET", "/v1/overview/models"): _READ,
    ("GET", "/v1/overview/awaited"): _READ,
    ("GET", "/v1/workers"): _READ,
    ("GET", "/v1/workers/{worker_id:path}"): _READ,
    ("GET", "/v1/workers/{worker_id:path}/logs"): _ADMIN,
    ("GET", "/v1/workers/{worker_id:path}/incidents"): _ADMIN,
    ("POST", "/v1/workers/{worker_id:path}/restart"): _ADMIN,
    ("POST", "/v1/workers/{worker_id:path}/drain"): _ADMIN,
    ("POST", "/v1/workers/{worker_id:path}/resume"): _ADMIN,
    ("GET", "/v1/lanes"): _READ,
    **{("POST", path): _SUBMIT for path in SERVED},
    ("GET", "/version"): _READ,
    ("GET", "/v1/models"): _READ,
    ("GET", "/v1/models/{model:path}"): _READ,
    ("GET", "/v1/models/{model:path}/tools"): _READ,
    ("GET", "/v1/models/{model:path}/adapters"): _READ,
    ("POST", "/v1/models/{model:path}/load"): _ADMIN,
    ("POST", "/v1/models/{model:path}/unload"): _ADMIN,
    ("POST", "/v1/models/{model:path}/adapters"): _ADMIN,
    ("DELETE", "/v1/models/{model:path}/adapters/{name:path}"): _ADMIN,
    ("GET", "/v1/models/{model:path}/weights"): _READ,
    ("POST", "/v1/models/{model:path}/weights/init"): _ADMIN,
    ("POST", "/v1/models/{model:path}/weights/update"): _ADMIN,
}


def caller_of(request: Request) -> Caller:
    """Return the caller that the gate found."""
    caller: Caller = request.scope["state"][CALLER]
    return caller


def is_unknown(request: Request) -> bool:
    """Whether the caller is unknown: the request has no key, and the path needs none."""
    return request.scope["state"][CALLER] is None


CallerNow = Annotated[Caller, Depends(caller_of)]


class AccessCheck:
    """Runs before every route: checks the caller's scope, the request's parameters and the key's rate."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def __repr__(self) -> str:
        return f"<AccessCheck {self._rates!r}>"

    async def __call__(self, request: Request) -> None:
        """Let a request pass.

        Raises:
            ScopeMissing: the key lacks the scope that the route needs.
            InvalidParameter: it has a query parameter, or a header of ours, that the route does not know.
            TooManyRequests: the key has submitted too often.
        """
        access = ROUTES.get((request.method, request.scope["route"].path), _ADMIN)
        if access.scope is None:  # open paths may have no caller, and probes may add any parameters
            return
        caller = caller_of(request)
        if not caller.may(access.scope):
            needed = f"{request.method} {request.url.path} needs the scope {access.scope}"
            raise ScopeMissing(f"{needed}, which this key lacks")
        check_parameters(request)
        wait_s = self._rates.admit_submission(caller) if access.is_metered else 0.0
        if wait_s > 0:
            raise TooManyRequests(caller.requests_per_s or 0.0, wait_s)
