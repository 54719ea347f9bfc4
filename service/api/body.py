"""A posted body, bounded in size and depth before anything is made of it."""

from typing import Any, Final

import msgspec
from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from service.conversations.spec import Limits
from service.errors import BodyMalformed, BodyTooLarge

HUNG_UP: Final = "the client hung up in the middle of it"


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that is read by ourselves, bounded; whoever puts the surface together adds its schema."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_document(request: Request, limits: Limits) -> object:
    """Return the JSON document of a request's body.

    Raises:
        BodyTooLarge: more than ``limits.body_bytes``; the rest is not read.
        BodyMalformed: no JSON, or deeper than ``limits.depth``.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limits.body_bytes:
                raise BodyTooLarge(f"the body is larger than limits.body_bytes = {limits.body_bytes}")
    except ClientDisconnect as error:
        raise BodyMalformed(HUNG_UP) from error
    return decode_document(bytes(body), limits)


def decode_document(body: bytes, limits: Limits) -> object:
    """Return the JSON document of some bytes.

    Raises:
        BodyMalformed: no JSON, or deeper than ``limits.depth``.
    """
    try:
        document: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BodyMalformed(f"the body is no usable JSON: {error}") from error
    if is_deeper_than(document, limits.depth):
        raise BodyMalformed(f"the body is nested more than limits.depth = {limits.depth} levels deep")
    return document


def is_deeper_than(document: object, depth: int) -> bool:
    """Whether ``document`` has containers nested more than ``depth`` deep."""
    level: list[object] = [document]
    for _ in range(depth):
        level = [item for value in level for item in _items(value)]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
