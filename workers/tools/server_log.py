"""What a tool server says on its standard error: in our log, under its name, with its last words kept."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TextIO

import anyio

CHUNK_BYTES: Final = 65_536
LINE_BYTES: Final = 2_000  # the rest of a longer line is a line of its own
LAST_WORDS: Final = 200
logger = logging.getLogger(__name__)


class StderrLog:
    """The standard error of one program at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._half = b""
        self.last_words = ""

    def __repr__(self) -> str:
        return f"<StderrLog {self._name}>"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TextIO]:
        """Give a file for a program to write to, and log what comes for as long as the block lasts."""
        self._half, self.last_words = b"", ""
        source, target = os.pipe()
        os.set_blocking(source, False)
        try:
            async with anyio.create_task_group() as tasks:
                with os.fdopen(target, "w", encoding="utf-8") as file:
                    tasks.start_soon(self._follow, source)
                    yield file
                tasks.cancel_scope.cancel()
        finally:
            self._take(source)  # what it said as it ended
            if self._half:
                self._tell(self._half)
            os.close(source)

    async def _follow(self, source: int) -> None:
        while True:
            await anyio.wait_readable(source)
            if not self._take(source):
                return

    def _take(self, source: int) -> bool:
        """Log what is there; return whether more may come."""
        try:
            read = os.read(source, CHUNK_BYTES)
        except BlockingIOError:
            return True
        *lines, self._half = (self._half + read).split(b"\n")
        for line in lines:
            self._tell(line)
        while len(self._half) > LINE_BYTES:
            self._tell(self._half[:LINE_BYTES])
            self._half = self._half[LINE_BYTES:]
        return bool(read)

    def _tell(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()
        text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
        if text:
            self.last_words = text[:LAST_WORDS]
            logger.info("MCP server %s says: %s", self._name, text[:LINE_BYTES])
