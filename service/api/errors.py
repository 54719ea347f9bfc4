"""What a request is refused for before anybody reads its body: the leaves of the tree that belong to the door.

ServiceError
├── RequestMalformed      400  no HTTP
├── RequestTooSlow        408
├── HeadTooLarge          431  request line and headers
├── TooManyConnections    503
├── ForeignOrigin         403  another page's request, or a name of ours that is none
└── MediaTypeUnknown      415
"""

from service.errors import ServiceError


class RequestMalformed(ServiceError):
    """What came is no HTTP."""

    status = 400
    code = "request_malformed"
    title = "The request is no HTTP"


class RequestTooSlow(ServiceError):
    """A request did not come to its end in time."""

    status = 408
    code = "request_too_slow"
    title = "The request came too slowly"


class HeadTooLarge(ServiceError):
    """Request line and headers are larger than the limit."""

    status = 431
    code = "head_too_large"
    title = "Request line and headers are too large"


class TooManyConnections(ServiceError):
    """As many connections are open as may be."""

    status = 503
    code = "too_many_connections"
    title = "Too many connections"
    retry_after_s = 1


class ForeignOrigin(ServiceError):
    """The request comes from a page of another origin, or was sent to a name that is not ours."""

    status = 403
    code = "foreign_origin"
    title = "Not a request of this machine's own"


class MediaTypeUnknown(ServiceError):
    """The body is of a kind that is not taken."""

    status = 415
    code = "media_type_unknown"
    title = "The body is of a kind that is not taken"
