"""A client's own body instead of an agent's prompt, and the engine's answer to it."""

import msgspec

from transport.request import TokenDetail


class PostedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request: ``body`` for ``path``, for the ``model`` that it names or an ``adapter`` of it.

    ``name`` is the model's name in the body, ``chars`` the estimated length of the prompt. ``answers`` is the number of
    answers it asks for, ``most_tokens`` the bound of each.

    ``marks`` identify its program, the most certain first; later requests are found by the first. ``owner`` is the name
    of its key. ``limit_s`` bounds its time on slots, ``wait_s`` its time in the queue; None is no bound.
    ``trace_parent`` is the header of that name (W3C Trace Context). With ``is_apart`` prompt caches are separate by
    key. A stream that ``continues`` goes on when its engine has broken off. A request of a ``session`` with ``records``
    has its answer's tokens recorded: its ``body`` is that of a chat then, whatever its path, and the answer is given
    whole.
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
    continues: bool = False
    session: str | None = None
    records: TokenDetail | None = None


class WholeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer, good or bad."""

    status: int
    content_type: str
    body: bytes
