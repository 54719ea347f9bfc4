"""A request that is passed to an engine as it was posted, and its answer passed on as it came."""

from collections.abc import Mapping
from typing import Final

import anyio
import msgspec

from transport.client import EngineClient
from transport.dialects.openai import CHAT_PATH
from transport.errors import CacheFull, EngineError, EngineRejected
from transport.relay import Passage, is_about_the_request
from workers.errors import AdapterUnknown
from workers.outcome import Cancelled, CancelReason, Completed, FailureReason, Outcome, RequestFailed
from workers.requests.answer import Answer, Phase
from workers.requests.cache_veil import CacheVeil, WholeLines
from workers.requests.tool_loop import RequestSettings, broken_off, rejected

UNBOUNDED: Final = 1 << 30  # tokens: what no request may have


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """A body for one of an engine's paths; ``passage`` takes the answer.

    ``model`` is the name in ``body``, and ``adapter`` the adapter that it stands for. ``chars`` is about how much there
    is to read. Without ``is_streamed`` nothing is heard of the answer before it is whole. ``limit_s`` bounds
    it, beside the worker's own ``request_s``. ``most_tokens`` bounds its answers together, where they are bounded.
    Prefixes are shared only among requests of one ``cache_owner``, where its engine knows such a thing; and no more
    than ``own_tokens`` are told to have been in a cache, None is as many as there were. ``owner`` is whose it is:
    connections to a server of others are kept for one owner.
    """

    job_name: str
    path: str
    body: bytes
    model: str
    adapter: str | None
    chars: int
    is_streamed: bool
    passage: Passage
    limit_s: float | None = None
    most_tokens: int | None = None
    cache_owner: str | None = None
    owner: str | None = None
    own_tokens: int | None = None


async def relay(client: EngineClient, settings: RequestSettings, request: Relay, answer: Answer) -> Outcome:
    """Return how ``request`` ended; ``answer`` holds what was read of it along the way."""
    limits = [limit for limit in (request.limit_s, settings.request_s) if limit is not None]
    if not limits:
        return await _ask(client, settings, request, answer)
    limit_s = min(limits)
    with anyio.move_on_after(limit_s) as answer.deadline:
        return await _ask(client, settings, request, answer)
    return RequestFailed(reason=FailureReason.DEADLINE, detail=f"not answered within {limit_s:g} s on a slot")


async def _ask(client: EngineClient, settings: RequestSettings, request: Relay, answer: Answer) -> Outcome:
    try:
        model, params = settings.adapted(request.adapter)
    except AdapterUnknown as error:
        return RequestFailed(reason=FailureReason.ADAPTER_UNLOADED, detail=str(error))
    scope = settings.cache_scope(request.cache_owner)
    ours = params if scope is None else {**params, "cache_salt": scope}
    body = request.body if model == request.model and not ours else _translated(request.body, {**ours, "model": model})
    answer.is_mute = not request.is_streamed
    generation = answer.begin_generation(settings.repetition, request.chars)
    if settings.admit_prompt is not None:
        later = 0 if request.is_streamed else request.most_tokens or UNBOUNDED
        chat = body if request.path == CHAT_PATH else None
        outcome = await settings.admit_prompt(answer, request.chars, chat, later)
        if outcome is not None:
            return outcome
    veil = None if request.own_tokens is None else CacheVeil(request.passage, request.own_tokens)
    passage: Passage = veil or request.passage
    renaming = None if model == request.model else Renaming(passage, model, request.model)
    try:
        whose = request.owner or "" if settings.is_others else None
        await client.relay(request.path, body, generation, renaming or passage, whose)
        for held_back in (renaming, veil):
            if held_back is not None:
                held_back.flush()
    except EngineRejected as error:
        if settings.admit_prompt is not None and isinstance(error, CacheFull):
            return Cancelled(reason=CancelReason.CACHE_FULL)
        return rejected(error, is_about_the_request=is_about_the_request(error))
    except EngineError as error:
        return broken_off(error)
    finally:
        answer.phase = Phase.US
    return Completed(finish_reason=generation.finish_reason or "unknown")


class Renaming:
    """A passage in which the engine's name of a model becomes the one that its client knows.

    The name is found by its key as JSON has it: within a text the quotes would be escaped. A line that is not whole is
    kept until it is, or until the end.
    """

    def __init__(self, passage: Passage, name: str, to: str) -> None:
        self._passage = passage
        written, wanted = msgspec.json.encode(name), msgspec.json.encode(to)
        self._pairs = [(b'"model":%b%b' % (gap, written), b'"model":%b%b' % (gap, wanted)) for gap in (b"", b" ")]
        self._lines = WholeLines()
        self._content_type = ""

    def __repr__(self) -> str:
        return f"<Renaming {self._pairs[0]}>"

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Give on the lines that are whole."""
        self._content_type = content_type
        whole = self._lines.cut(frames)
        if whole:
            self._passage.pass_frames(content_type, self._renamed(whole))

    def flush(self) -> None:
        """Give on what has no end of its own."""
        rest = self._lines.take_rest()
        if rest:
            self._passage.pass_frames(self._content_type, self._renamed(rest))

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Give on a whole answer."""
        self._passage.pass_whole(status, content_type, self._renamed(body))

    def _renamed(self, text: bytes) -> bytes:
        for written, wanted in self._pairs:
            text = text.replace(written, wanted)
        return text


def _translated(body: bytes, ours: Mapping[str, object]) -> bytes:
    """Return a body with some fields of ours; all others stay in their order and as they were written.

    Raises:
        BodyUnusable: a name in it is no text, which the first look at it passes over.
    """
    fields: dict[str, object] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    salt, ours_salt = fields.get("cache_salt"), ours.get("cache_salt")
    if isinstance(salt, msgspec.Raw) and ours_salt is not None:
        ours = {**ours, "cache_salt": f"{msgspec.json.decode(salt)}.{ours_salt}"}
    return msgspec.json.encode({**fields, **ours})
