"""The bounds of what tools bring, whatever kind they are: more than this fits no model's context.

A long document is encoded and decoded in a thread. That of many values is refused before it is, since a thread that
makes objects holds the event loop as well.
"""

import json
from typing import Final

import anyio.to_thread

MAX_RESULT_BYTES: Final = 4 * 1024 * 1024
MAX_RESULT_VALUES: Final = 100_000  # of which Python makes objects in some 20 ms
SMALL_BYTES: Final = 64 * 1024
SMALL_VALUES: Final = 1000


class ResultTooLarge(ValueError):
    """A result is larger than any may be; its text says by which bound."""


def check_document(document: bytes) -> None:
    """Check that a document may be decoded.

    Raises:
        ResultTooLarge: it is too long, or of too many values.
    """
    if len(document) > MAX_RESULT_BYTES:
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes")
    if len(document) > SMALL_BYTES and document.count(b",") + document.count(b"[") > MAX_RESULT_VALUES:
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_VALUES} values")


async def decode_result(document: bytes) -> object:
    """Decode a JSON document.

    Raises:
        ResultTooLarge: it is too long, or of too many values.
        ValueError, RecursionError: it is no JSON.
    """
    check_document(document)
    if len(document) <= SMALL_BYTES:
        return json.loads(document)
    return await anyio.to_thread.run_sync(json.loads, document)


async def encode_bounded(result: object) -> str:
    """Return the JSON of a call's result, as the model is shown it.

    Raises:
        ResultTooLarge: it is too long, or of too many values.
        TypeError, ValueError, RecursionError: it is no JSON.
    """
    if _is_within(result, SMALL_BYTES, SMALL_VALUES):
        return encode_result(result)
    return await anyio.to_thread.run_sync(_encode_large, result)


def encode_result(result: object) -> str:
    """Return the JSON of a result that is known to be small.

    Raises:
        TypeError, ValueError, RecursionError: it is no JSON.
    """
    # The standard library's encoder, and strict: NaN is no JSON, and an object of the runner's own is a defect of it.
    encoded = json.dumps(result, allow_nan=False, ensure_ascii=False)
    encoded.encode()
    return encoded


def is_bounded(result: object) -> bool:
    """Whether a result has no more letters and values than any may have."""
    return _is_within(result, MAX_RESULT_BYTES, MAX_RESULT_VALUES)


def _encode_large(result: object) -> str:
    if not is_bounded(result):
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes or {MAX_RESULT_VALUES} values")
    encoded = encode_result(result)
    if len(encoded) > MAX_RESULT_BYTES:
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes")
    return encoded


def _is_within(result: object, most_chars: int, most_values: int) -> bool:
    """Tell whether a result has at most so many letters and values; a circle has more than any."""
    left: list[object] = [result]
    chars = values = 0
    while left:
        value = left.pop()
        values += 1
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict):
            if values + 2 * len(value) > most_values:
                return False
            left += value.keys()
            left += value.values()
        elif isinstance(value, list | tuple):
            if values + len(value) > most_values:
                return False
            left += value
        if chars > most_chars or values > most_values:
            return False
    return True
