"""Refusals before a body is read: the leaves of the tree that belong to the door."""

import math

from service.errors import ServiceError


class RequestMalformed(ServiceError, status=400, code="request_malformed", title="The request is not HTTP"):
    """A request that is no HTTP."""


class RequestTooSlow(ServiceError, status=408, code="request_too_slow", title="The request came too slowly"):
    """A request did not come to its end in time."""


class HeadTooLarge(ServiceError, status=431, code="head_too_large", title="Request line and headers are too large"):
    """Request line and headers are larger than the limit."""


class TooManyConnections(
    ServiceError, status=503, code="too_many_connections", title="Too many connections", retry_after_s=1
):
    """As many connections are open as may be."""


class ForeignOrigin(ServiceError, status=403, code="foreign_origin", title="Not a request of this machine's own"):
    """The request comes from a page of another origin, or was sent to a name that is not ours."""


class MediaTypeUnknown(
    ServiceError, status=415, code="media_type_unknown", title="The body is of a kind that is not taken"
):
    """The body is of a kind that is not taken."""


class TooManyRequests(ServiceError, status=429, code="too_many_requests", title="The key submits too often"):
    """The key has submitted as much as it may at the moment."""

    def __init__(self, rate: float, after_s: float) -> None:
        super().__init__(f"this key may submit {rate:g} times a second (requests_per_s)")
        self.retry_after_s = math.ceil(after_s)


class ScopeMissing(ServiceError, status=403, code="scope_missing", title="The key may not do that"):
    """The key has not the scope that the route needs."""
