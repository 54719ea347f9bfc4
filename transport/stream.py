"""One chat stream as a sans-IO object: body bytes in, semantic events out."""

from transport.dialects import llama_server
from transport.errors import MalformedFrame, TruncatedStream
from transport.events import Event, Finished
from transport.sse import MAX_FRAME_BYTES, FrameDecoder


class ChatStream:
    """Reads the body of one streamed answer.

    The stream is complete when the engine has sent ``[DONE]``; an end of the body after a finish reason counts too,
    because some servers end so. Anything else that ends it is a truncation.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._frames = FrameDecoder(max_frame_bytes)
        self._has_finish_reason = False
        self._is_complete = False

    def __repr__(self) -> str:
        """State how far the stream is."""
        return f"<ChatStream complete={self._is_complete} finish_reason_seen={self._has_finish_reason}>"

    @property
    def is_complete(self) -> bool:
        """Whether the engine has said that nothing more will come."""
        return self._is_complete

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that ``chunk`` completes; what follows ``[DONE]`` is ignored.

        Raises:
            EngineRejected: the engine reports an error inside the stream.
            EngineProtocolError: the bytes are not the dialect.
        """
        return self._decode(self._frames.feed(chunk))

    def close(self) -> list[Event]:
        """Take the end of the body; return the last events.

        Raises:
            TruncatedStream: the engine had not finished.
        """
        try:
            events = self._decode(self._frames.close())
        except MalformedFrame as error:
            raise TruncatedStream("the stream ended in the middle of a frame") from error
        if not (self._is_complete or self._has_finish_reason):
            raise TruncatedStream("the stream ended before the engine had finished")
        self._is_complete = True
        return events

    def _decode(self, frames: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for frame in frames:
            if self._is_complete:
                break
            if frame == llama_server.DONE:
                self._is_complete = True
                break
            for event in llama_server.decode(frame):
                if type(event) is Finished:
                    self._has_finish_reason = True
                events.append(event)
        return events
