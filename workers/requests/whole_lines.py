"""Lines of a stream, whole: a passage that changes what stands in a line needs all of it."""


class WholeLines:
    """Gives on the lines that have ended, and keeps the beginning of the next."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def __repr__(self) -> str:
        return f"<WholeLines rest={len(self._rest)}>"

    @property
    def is_between(self) -> bool:
        """Whether nothing of a line is kept."""
        return not self._rest

    def take(self, piece: bytes) -> bytes:
        """Return the lines that have ended with a piece."""
        end = piece.rfind(b"\n") + 1  # what is kept holds none: a long line is not searched again with each piece
        if not end:
            self._rest += piece
            return b""
        whole = bytes(self._rest) + piece[:end]
        self._rest = bytearray(piece[end:])
        return whole

    def take_rest(self) -> bytes:
        """Return what has no end of its own, and keep nothing."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest
