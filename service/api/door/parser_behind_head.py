"""A parser that goes on in the middle of a request whose offer of an upgrade is passed over (RFC 9110, section 7.8).

httptools ends at such a head, and takes what follows for another protocol. Java's client and ``curl --http2`` offer h2c
with every request that is not encrypted.
"""

from collections.abc import Iterable
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


def parser_behind_head(door: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Return a parser that tells ``door`` of all that follows the first head that it is fed."""
    parser = httptools.HttpRequestParser(_BehindHead(door))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
    return parser


def framing_head(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head that says no more than how long the body is that follows a head with these headers."""
    framing = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] in FRAMING)
    return b"POST / HTTP/1.1\r\n%b\r\n" % framing


class _BehindHead:
    """Tells a door of what a parser finds behind the first head."""

    def __init__(self, door: HttpToolsProtocol) -> None:
        self._door = door
        self._is_behind = False
        self.on_body = door.on_body
        self.on_message_complete = door.on_message_complete

    def __repr__(self) -> str:
        return f"<_BehindHead of {self._door!r}>"

    def on_message_begin(self) -> None:
        """Take the first byte of a request."""
        if self._is_behind:
            self._door.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of its target."""
        if self._is_behind:
            self._door.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or one that trails a body."""
        if self._is_behind:
            self._door.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take the end of its head."""
        if self._is_behind:
            self._door.on_headers_complete()
        self._is_behind = True
