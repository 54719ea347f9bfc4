"""Bodies of answers beside the token path, bounded as they come: a packed kilobyte may unpack to a gigabyte."""

import socket
from collections.abc import Mapping
from typing import Final

import httpx

# Asked for with every request: httpx by itself asks for whatever it can unpack.
UNPACKED: Final[Mapping[str, str]] = {"Accept-Encoding": "identity"}
# uvloop takes all that a kernel holds of an answer, megabytes of one without end, before its reader is asked once.
LITTLE_AHEAD: Final = ((socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024),)


class UnreadableBody(Exception):
    """A body is packed, or larger than it may be; its text says which."""


async def read_body(answer: httpx.Response, most_bytes: int) -> bytes:
    """Return the whole body of an answer that is being streamed.

    Raises:
        UnreadableBody: it is packed, or larger than ``most_bytes``; the rest is not read.
    """
    body = await read_beginning(answer, most_bytes + 1)
    if len(body) > most_bytes:
        raise UnreadableBody(f"an answer of more than {most_bytes} bytes")
    return body


async def read_beginning(answer: httpx.Response, most_bytes: int) -> bytes:
    """Return how a body begins; the rest is not read.

    Raises:
        UnreadableBody: it is packed.
    """
    coding = answer.headers.get("content-encoding", "").strip().lower()
    if coding not in {"", "identity"}:
        raise UnreadableBody(f"an answer that is packed ({coding[:50]}), which nobody asked for")
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) >= most_bytes:
            break
    return bytes(body[:most_bytes])
