"""The part of a streamed answer that its client has received, for another engine to go on from."""

from typing import Final

import msgspec

from transport.dialects.frame_parts import Block, FrameParts, Sign, UnknownPart, is_text, is_thought
from transport.errors import UNDECODABLE
from transport.sse import FrameDecoder

MOST_UNREAD_BYTES: Final = 512 * 1024  # frames of some 2,000 tokens; most streams end before they are read
SAME: Final = ("id", "created", "model", "system_fingerprint")  # in every frame of a stream of completions


class HeldFrames(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a ``SentStream``, for another program."""

    head: dict[str, object]
    opened: list[tuple[Block, str]]
    closed: list[Block]
    ended: list[str]
    words: list[tuple[Block, str]]
    ids: list[str]
    items: dict[str, int]
    last_number: int | None


class SentStream:
    """The frames of one stream that its client has; they are read when another answer is to be joined to them.

    ``fault`` says why none can be.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._unread: list[bytes] = []
        self.unread_bytes = 0
        self._decoder = FrameDecoder()
        self._parts = FrameParts(path)
        self.head: dict[str, object] = {}
        self.opened: dict[Block, str] = {}
        self.closed: set[Block] = set()
        self.ended: set[str] = set()  # the frames after its last words
        self.last_number: int | None = None  # the last ``sequence_number``
        self.fault: str | None = None
        self._words: dict[Block, list[str]] = {}

    def __repr__(self) -> str:
        return f"<SentStream {self.path} blocks={len(self.opened)} fault={self.fault}>"

    def add(self, frames: bytes) -> None:
        """Take frames that were passed on."""
        self._unread.append(frames)
        self.unread_bytes += len(frames)
        if self.unread_bytes > MOST_UNREAD_BYTES:
            self.catch_up()

    def catch_up(self) -> None:
        """Read the frames so far."""
        frames, self._unread, self.unread_bytes = b"".join(self._unread), [], 0
        for data in self._decoder.feed(frames):
            if self.fault is None and data.startswith(b"{"):
                self._take(data)
        if self._decoder.failure is not None and self.fault is None:
            self.fault = f"its frames cannot be read: {self._decoder.failure}"

    def hand_over(self) -> HeldFrames:
        """Return its parts so far."""
        self.catch_up()
        return HeldFrames(
            head=self.head,
            opened=list(self.opened.items()),
            closed=list(self.closed),
            ended=list(self.ended),
            words=list(self.words.items()),
            ids=self.ids,
            items=self._parts.items,
            last_number=self.last_number,
        )

    def take_over(self, held: HeldFrames) -> None:
        """Take over the parts that an earlier program has sent."""
        self.head, self.last_number = held.head, held.last_number
        self.opened, self.closed, self.ended = dict(held.opened), set(held.closed), set(held.ended)
        self._words = {block: [words] for block, words in held.words}
        self._parts.ids.extend(held.ids)
        self._parts.items.update(held.items)

    @property
    def ids(self) -> list[str]:
        """The names of its blocks."""
        return self._parts.ids

    @property
    def words(self) -> dict[Block, str]:
        """The words of each block."""
        return {block: "".join(pieces) for block, pieces in self._words.items()}

    def words_where(self, *, are_thoughts: bool) -> list[str]:
        """Return the words of the blocks that hold the answer itself, or of those that hold thoughts."""
        of_kind = is_thought if are_thoughts else is_text
        return [words for block, words in self.words.items() if of_kind(block) and words]

    def _take(self, data: bytes) -> None:
        try:
            document = msgspec.json.decode(data)
            parts = self._parts.split(document)
        except (UnknownPart, *UNDECODABLE) as error:
            self.fault = f"its client has frames of another form: {error}"
            return
        if document.get("error"):
            self.fault = "its client has an error of the engine's"
        if not self.head:
            self.head = {name: document[name] for name in SAME if name in document}
        self.last_number = document.get("sequence_number", self.last_number)
        for part in parts:
            if part.sign is Sign.OPENS:
                self.opened[part.block] = part.label
            elif part.sign is Sign.SAYS:
                self._words.setdefault(part.block, []).append(part.holder[part.field])
            elif part.sign is Sign.CLOSES:
                self.closed.add(part.block)
            else:
                self.ended.add(part.label)
