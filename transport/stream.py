"""One chat stream as a sans-IO object: body bytes in, semantic events out."""

from collections.abc import Callable

from transport.dialects import openai
from transport.errors import EngineError, EngineRejected, MalformedFrame, TruncatedStream, without_frames
from transport.events import Event
from transport.sse import MAX_FRAME_BYTES, FrameDecoder


class ChatStream:
    """Reads the body of one streamed answer.

    The stream is complete when the engine has sent ``[DONE]``; an end of the body after a finish reason counts too,
    because some servers end so. Anything else that ends it is a failure, and is kept as a value: what came before it in
    the same read has come, and is returned like everything else. ``decode`` adds the events of a frame to a list and
    returns whether the model has stopped with it.
    """

    def __init__(
        self, max_frame_bytes: int = MAX_FRAME_BYTES, decode: Callable[[bytes, list[Event]], bool] = openai.decode
    ) -> None:
        self._decode_frame = decode
        self.failure: EngineError | None = None
        self.is_complete = False
        self._frames = FrameDecoder(max_frame_bytes)
        self._has_finish_reason = False

    def __repr__(self) -> str:
        return f"<ChatStream complete={self.is_complete} failure={self.failure!r}>"

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come, for better or worse."""
        return self.is_complete or self.failure is not None

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that ``chunk`` completes; what follows ``[DONE]`` or a failure is ignored."""
        if self.is_complete or self.failure is not None:
            return []
        events = self._decode(self._frames.feed(chunk))
        if self._frames.failure is not None and not self.is_over:
            self.failure = self._frames.failure
        return events

    def close(self) -> list[Event]:
        """Take the end of the body; return the last events."""
        if self.is_over:
            return []
        events = self._decode(self._frames.close())
        if self.is_complete or (self._has_finish_reason and not isinstance(self.failure, EngineRejected)):
            self.is_complete, self.failure = True, None
        elif self.failure is None:
            self.failure = TruncatedStream("the stream ended before the engine had finished")
        elif isinstance(
            self.failure, MalformedFrame
        ):  # half a frame, which only the end has made look like a whole one
            cause, self.failure = self.failure, TruncatedStream("the stream ended in the middle of a frame")
            self.failure.__cause__ = cause
        return events

    def _decode(self, frames: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for frame in frames:
            if frame == openai.DONE:
                self.is_complete = True
                break
            try:
                if self._decode_frame(frame, events):
                    self._has_finish_reason = True
            except EngineError as error:
                self.failure = without_frames(error)
                break
        return events
