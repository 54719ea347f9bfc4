"""Bodies of answers outside the token path, read up to a bound: a packed kilobyte may unpack to a gigabyte."""

import socket
from collections.abc import Mapping
from typing import Final

import httpx

# Sent with every request: by default httpx asks for every encoding that it can unpack.
UNPACKED: Final[Mapping[str, str]] = {"Accept-Encoding": "identity"}
# uvloop reads all that the kernel has buffered, megabytes of an endless answer, before it calls its reader.
LITTLE_AHEAD: Final = ((socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024),)


class UnreadableBody(Exception):
    """A body is packed or too large; the text says which."""


async def read_body(answer: httpx.Response, most_bytes: int) -> bytes:
    """Return the whole body of a streamed answer.

    Raises:
        UnreadableBody: it is packed, or larger than ``most_bytes``; the rest is not read.
    """
    body = await read_beginning(answer, most_bytes + 1)
    if len(body) > most_bytes:
        raise UnreadableBody(f"an answer of more than {most_bytes} bytes")
    return body


async def read_beginning(answer: httpx.Response, most_bytes: int) -> bytes:
    """Return the beginning of a body; the rest is not read.

    Raises:
        UnreadableBody: it is packed.
    """
    coding = answer.headers.get("content-encoding", "").strip().lower()
    if coding not in {"", "identity"}:
        raise UnreadableBody(f"the answer is compressed ({coding[:50]}), although no compression was requested")
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) >= most_bytes:
            break
    return bytes(body[:most_bytes])
