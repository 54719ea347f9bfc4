"""One chat stream as a sans-IO object: body bytes in, semantic events out."""

from typing import Final

from transport.dialects import openai
from transport.dialects.recording import PLAIN_ANSWERS, AnswerReaders
from transport.errors import (
    EngineError,
    EngineRejected,
    MalformedFrame,
    TruncatedStream,
    UnreadableFrame,
    without_frames,
)
from transport.events import Advance, Event, RefusalDelta, TextDelta, ToolCallDelta
from transport.sse import MAX_FRAME_BYTES, FrameDecoder

SAID: Final = (TextDelta, ToolCallDelta, RefusalDelta, Advance)


class ChatStream:
    """Reads the body of one streamed answer.

    The stream is complete when the model has stopped, which its finish reason says, and the engine has sent ``[DONE]``
    or closed the body. Without ``tells_reason`` the engine may omit the reason, and ``[DONE]`` after words or calls
    suffices. Any other end is a failure, kept as a value: events before it in the same read are returned like all
    others. ``readers`` add the events of a frame, or of an answer that comes whole, to a list and return whether the
    model has stopped with it.
    """

    def __init__(
        self,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        readers: AnswerReaders = PLAIN_ANSWERS,
        *,
        tells_reason: bool = True,
    ) -> None:
        self._decode_frame, self.decode_whole = readers.decode, readers.decode_whole
        self._tells_reason = tells_reason
        self._has_said = False
        self.failure: EngineError | None = None
        self.is_complete = False
        self.has_reason = False  # the model's finish reason has come
        self._frames = FrameDecoder(max_frame_bytes)

    def __repr__(self) -> str:
        return f"<ChatStream complete={self.is_complete} failure={self.failure!r}>"

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come, for better or worse."""
        return self.is_complete or self.failure is not None

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that ``chunk`` completes; bytes after ``[DONE]`` or a failure are ignored."""
        if self.is_complete or self.failure is not None:
            return []
        events = self._decode(self._frames.feed(chunk))
        if self._frames.failure is not None and not self.is_over:
            self.failure = self._frames.failure
        return events

    def close(self) -> list[Event]:
        """Handle the end of the body; return the last events."""
        if self.is_over:
            return []
        events = self._decode(self._frames.close())
        if self.is_complete or (self.has_reason and not isinstance(self.failure, EngineRejected)):
            self.is_complete, self.failure = True, None
        elif self.failure is None:
            self.failure = TruncatedStream("the stream ended before the engine had finished")
        elif isinstance(self.failure, MalformedFrame):  # half a frame that only the end made look whole
            cause, self.failure = self.failure, TruncatedStream("the stream ended in the middle of a frame")
            self.failure.__cause__ = cause
        return events

    def _decode(self, frames: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for frame in frames:
            if frame == openai.DONE:
                self._take_done(events)
                break
            try:
                if self._decode_frame(frame, events):
                    self.has_reason = True
            except UnreadableFrame as error:
                if frame.strip() == openai.DONE:
                    self._take_done(events)
                    break
                if frame.strip():
                    self.failure = without_frames(error)
                    break
            except EngineError as error:
                self.failure = without_frames(error)
                break
        if events and not self._has_said:
            self._has_said = any(isinstance(event, SAID) for event in events)
        return events

    def _take_done(self, events: list[Event]) -> None:
        if self.has_reason or (
            not self._tells_reason and (self._has_said or any(isinstance(event, SAID) for event in events))
        ):
            self.is_complete = True
        else:
            self.failure = TruncatedStream("the stream ended with [DONE] before the engine had finished")
