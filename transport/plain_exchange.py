"""One POST whose whole answer is returned as bytes, on the same connections as chats."""

import asyncio
from typing import Final

from typing_extensions import override

from transport.dialects.refusals import decode_error
from transport.events import Event
from transport.exchange import Exchange

_OK: Final = 200


class _Deaf:
    """A receiver without interest in events."""

    def begin_stream(self) -> None:
        """Take the start of an answer."""

    def touch(self) -> None:
        """Take the arrival of bytes."""

    def receive(self, event: Event) -> None:
        """Take an event."""


class PlainExchange(Exchange):
    """``body`` is the answer once ``finished`` is done."""

    def __init__(self, request: bytes, finished: "asyncio.Future[None]") -> None:
        super().__init__(request, _Deaf(), finished)
        self.body = b""

    @override
    def _end_whole(self) -> None:
        if self._status != _OK:
            self._fail(decode_error(self._status, self._headers, bytes(self._body)))
        elif not self.finished.done():
            self.body = bytes(self._body)
            self.finished.set_result(None)
