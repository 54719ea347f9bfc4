"""The bounds of tool results of any kind: more than this fits no model's context.

A long document is encoded and decoded in a thread. One with too many values is refused before that, since a thread that
makes objects also holds the event loop.
"""

import json
from typing import Final

import anyio.to_thread

MAX_RESULT_BYTES: Final = 4 * 1024 * 1024
MAX_RESULT_VALUES: Final = 100_000  # Python makes that many objects in some 20 ms
SMALL_BYTES: Final = 64 * 1024
SMALL_VALUES: Final = 1000


class ResultTooLarge(ValueError):
    """A result is too large; the text says by which bound."""


def check_document(document: bytes) -> None:
    """Check that a document may be decoded.

    Raises:
        ResultTooLarge: it is too long, or has too many values.
    """
    if len(document) > MAX_RESULT_BYTES:
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes")
    if len(document) > SMALL_BYTES and document.count(b",") + document.count(b"[") > MAX_RESULT_VALUES:
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_VALUES} values")


async def decode_result(document: bytes) -> object:
    """Decode a JSON document.

    Raises:
        ResultTooLarge: it is too long, or has too many values.
        ValueError, RecursionError: it is not JSON.
    """
    check_document(document)
    if len(document) <= SMALL_BYTES:
        return json.loads(document)
    return await anyio.to_thread.run_sync(json.loads, document)


async def encode_bounded(result: object) -> str:
    """Return the JSON of a call's result, as the model is shown it.

    Raises:
        ResultTooLarge: it is too long, or has too many values.
        TypeError, ValueError, RecursionError: it is not JSON.
    """
    if _is_within(result, SMALL_BYTES, SMALL_VALUES):
        return encode_result(result)
    return await anyio.to_thread.run_sync(_encode_large, result)


def encode_result(result: object) -> str:
    """Return the JSON of a result that is known to be small.

    Raises:
        TypeError, ValueError, RecursionError: it is not JSON.
    """
    # The standard library's encoder, and strict: NaN is not JSON, and other objects are a defect of the runner.
    encoded = json.dumps(result, allow_nan=False, ensure_ascii=False)
    encoded.encode()
    return encoded


def is_bounded(result: object) -> bool:
    """Whether a result is within the bounds of letters and values."""
    return _is_within(result, MAX_RESULT_BYTES, MAX_RESULT_VALUES)


def _encode_large(result: object) -> str:
    if not is_bounded(result):
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes or {MAX_RESULT_VALUES} values")
    encoded = encode_result(result)
    if len(encoded) > MAX_RESULT_BYTES:
        raise ResultTooLarge(f"a result of more than {MAX_RESULT_BYTES} bytes")
    return encoded


def _is_within(result: object, most_chars: int, most_values: int) -> bool:
    """Return whether a result has at most that many letters and values; a circular one never does."""
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
