"""Refusals before a body is read: the door's leaves of the error tree."""

import math

from service.errors import ServiceError


class RequestMalformed(ServiceError, status=400, code="request_malformed", title="The request is not HTTP"):
    """The request is not HTTP."""


class RequestTooSlow(ServiceError, status=408, code="request_too_slow", title="The request came too slowly"):
    """The request did not arrive completely in time."""


class HeadTooLarge(ServiceError, status=431, code="head_too_large", title="Request line and headers are too large"):
    """Request line and headers are larger than the limit."""


class TooManyConnections(
    ServiceError, status=503, code="too_many_connections", title="Too many connections", retry_after_s=1
):
    """All places for connections are taken."""


class ForeignOrigin(ServiceError, status=403, code="foreign_origin", title="The host or origin is not allowed"):
    """The request comes from a page of another origin, or was sent to a name that is not the service's."""


class MediaTypeUnknown(ServiceError, status=415, code="media_type_unknown", title="The media type is not supported"):
    """The body's media type is not accepted."""


class TooManyRequests(ServiceError, status=429, code="too_many_requests", title="The key submits too often"):
    """The key has reached its rate of submissions."""

    def __init__(self, rate: float, after_s: float) -> None:
        super().__init__(f"this key may submit {rate:g} times per second (requests_per_s)")
        self.retry_after_s = math.ceil(after_s)


class ScopeMissing(ServiceError, status=403, code="scope_missing", title="The key lacks a scope"):
    """The key lacks the scope that the route needs."""
