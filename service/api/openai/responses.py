"""The responses of relayed paths, as OpenAPI describes them."""

from http import HTTPStatus
from typing import Any, Final

JSON: Final = "application/json"
ERROR: Final = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
REFUSALS: Final = (
    400,
    401,
    403,
    404,
    408,
    413,
    415,
    429,
    431,
    500,
    502,
    503,
    504,
)  # statuses of our own; engines may answer other 4xx
ANSWERED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The engine's answer, unchanged", "content": {JSON: {}, "text/event-stream": {}}},
    **{status: {"description": HTTPStatus(status).phrase, "content": {JSON: {"schema": ERROR}}} for status in REFUSALS},
    "4XX": {"description": "The engine's own refusal", "content": {JSON: {"schema": ERROR}}},
}
REFUSED_EARLY: Final[dict[int | str, dict[str, Any]]] = {status: ANSWERED[status] for status in (401, 403, 408, 431)}
