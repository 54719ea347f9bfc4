"""A client's own body in place of an agent's prompt, and the engine's answer to it."""

import msgspec


class PostedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's post: ``body`` for ``path``, of the ``model`` that it names, or of an ``adapter`` on that.

    ``name`` is what the body calls it, ``chars`` about how long its prompt is. ``answers`` is how many it asks for,
    ``most_tokens`` how long each may be.
    ``marks`` are what its program is known by, the surest first; the first is what it is known by afterwards.
    ``owner`` is the name of its key. ``limit_s`` bounds its time on slots, ``wait_s`` the time that it waits for them;
    None is for ever. ``trace_parent`` is the header of that name (W3C Trace Context), if it came. What is told of
    prompt caches ``is_apart`` from other keys.
    """

    path: str
    body: bytes
    name: str
    model: str
    adapter: str | None = None
    is_streamed: bool = False
    answers: int = 1
    most_tokens: int | None = None
    chars: int = 0
    priority: int = 0
    owner: str | None = None
    marks: tuple[bytes, ...] = ()
    limit_s: float | None = None
    wait_s: float | None = None
    trace_parent: str | None = None
    is_apart: bool = False


class WholeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer, good or bad."""

    status: int
    content_type: str
    body: bytes
