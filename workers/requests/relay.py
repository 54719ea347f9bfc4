"""A request that is passed to an engine as posted, and its answer passed on unchanged."""

from collections.abc import Mapping
from typing import Final, Protocol

import anyio
import msgspec

from transport.client import EngineClient
from transport.dialects.openai import CHAT_PATH
from transport.dialects.refusals import encode_error
from transport.errors import CacheFull, EngineError, EngineRejected, RequestAtFault, without_frames
from transport.relay import JSON, Passage, is_about_the_request
from transport.request import ChatRequest, TokenDetail
from workers.errors import AdapterUnknown
from workers.outcome import Cancelled, CancelReason, Completed, FailureReason, Outcome, RequestFailed
from workers.requests.answer import Answer, Phase
from workers.requests.answer_begins import again
from workers.requests.asking import ask_fairly
from workers.requests.cache_veil import CacheVeil, WholeLines
from workers.requests.halves import HalfAnswer
from workers.requests.recording import begin_record, is_mute, record_tokens
from workers.requests.request_ends import broken_off, declined, is_refused, rejected
from workers.requests.sent import SentStream
from workers.requests.splice import Splice
from workers.requests.tool_loop import AdmitPrompt, RequestSettings

NOT_CONTINUED: Final = RequestFailed(
    reason=FailureReason.ENGINE_UNREACHABLE, detail="its engine broke off, and the next one cannot go on with it"
)
UNBOUNDED: Final = 1 << 30  # more tokens than any request may have


class ClientsPassage(Passage, Protocol):
    """A passage that ends at the client: what it has received cannot be taken back."""

    @property
    def has_begun(self) -> bool:
        """Whether a piece of a stream was passed on."""


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """A body for one of an engine's paths; ``passage`` takes the answer.

    ``model`` is the name in ``body``, and ``adapter`` the adapter that it stands for. ``chars`` is the approximate size
    of the prompt. Without ``is_streamed`` the answer shows nothing before it is whole. ``limit_s`` bounds it, beside
    the worker's own ``request_s``. ``most_tokens`` bounds the sum of its answers, if they are bounded. An engine that
    knows scopes shares prefixes only among requests of one ``cache_owner``; no more than ``own_tokens`` are shown as
    cached, None shows all. ``owner`` is the key it belongs to: connections to an attached server are kept per owner.
    With ``half`` the stream of an earlier attempt goes on, of which the client has ``sent``. If it cannot, the request
    ends as ``broken``, the reason of that attempt. With ``records`` the body is that of a chat, whatever the path, and
    the answer holds its words and tokens: ``passage`` gets nothing but a refusal.
    """

    job_name: str
    path: str
    body: bytes
    model: str
    adapter: str | None
    chars: int
    is_streamed: bool
    passage: ClientsPassage
    limit_s: float | None = None
    most_tokens: int | None = None
    cache_owner: str | None = None
    owner: str | None = None
    own_tokens: int | None = None
    half: HalfAnswer | None = None
    sent: SentStream | None = None
    broken: RequestFailed | None = None
    records: TokenDetail | None = None


async def relay(client: EngineClient, settings: RequestSettings, request: Relay, answer: Answer) -> Outcome:
    """Return how ``request`` ended; ``answer`` holds the parts that were read along the way."""
    try:
        asking = _Asking(client, settings, request, answer)
    except AdapterUnknown as error:
        return RequestFailed(reason=FailureReason.ADAPTER_UNLOADED, detail=str(error))
    limit_s = request.limit_s if settings.request_s is None else settings.request_s
    run = asking.ask if request.half is None else asking.go_on
    if request.records is not None:
        run = asking.ask_recorded
    if limit_s is None:
        return await run()
    if request.limit_s is not None:
        limit_s = min(limit_s, request.limit_s)
    with anyio.move_on_after(limit_s) as answer.deadline:
        return await run()
    return RequestFailed(reason=FailureReason.DEADLINE, detail=f"not answered within {limit_s:g} s on a slot")


class _Asking:
    """The asking for one relayed answer, from its beginning or from where an earlier attempt broke off."""

    def __init__(self, client: EngineClient, settings: RequestSettings, request: Relay, answer: Answer) -> None:
        model, params = settings.adapted(request.adapter)
        scope = settings.cache_scope(request.cache_owner)
        ours = params if scope is None else {**params, "cache_salt": scope}
        has_own = model == request.model and not ours
        self._client = client
        self._settings = settings
        self._request = request
        self._answer = answer
        self._model = model
        self._body = request.body if has_own else _translated(request.body, {**ours, "model": model})
        self._held_back: list[CacheVeil | Renaming] = []  # parts of the passage that hold pieces back

    async def ask_recorded(self) -> Outcome:
        """Ask for an answer with its tokens, and record them; return how it ended."""
        client, settings, request, answer = self._client, self._settings, self._request, self._answer
        chat = _chat_of(self._body, request.records)
        answer.asked, answer.is_mute = chat, is_mute(client)
        answer.begin_generation(settings.repetition, request.chars)
        later = request.most_tokens or UNBOUNDED if answer.is_mute else 0
        if settings.admit_prompt is not None:
            refused = await settings.admit_prompt(answer, request.chars, self._body, later)
            if refused is not None:
                return refused

        async def ask() -> None:
            answer.begin_again(settings.repetition, request.chars)
            try:
                await begin_record(client, chat, answer)
                await client.stream(chat, answer.generation)
            finally:
                answer.phase = Phase.US  # until it is asked again the engine's silence means nothing

        failed = await ask_fairly(
            ask,
            lambda: answer.generation.first_token_at is not None,
            settings.excuse,
            is_others=settings.is_others,
        )
        if failed is not None:
            return _failure_of(failed, settings, request, is_passed=False)
        reason = answer.generation.finish_reason
        if reason is None:  # all engines that tell tokens give one
            detail = "the answer ended before the engine had finished"
            return RequestFailed(reason=FailureReason.ENGINE_REJECTED, detail=detail)
        return await record_tokens(client, chat, answer, settings.version()) or Completed(finish_reason=reason)

    async def go_on(self) -> Outcome:
        """Go on with half an answer; if the engine cannot, let it write all of it again, and pass on the rest."""
        begins, half, sent = self._settings.begins, self._request.half, self._request.sent
        assert half is not None  # noqa: S101 - both are there, or none
        assert sent is not None  # noqa: S101
        try:
            longer, going_on = await begins.prepare_body(self._body, half, sent)
        except EngineError as error:
            return broken_off(without_frames(error))
        splice = Splice(self._request.passage, sent, going_on)
        outcome = await self.ask(splice, longer)
        has_strayed = self._answer.generation.has_strayed  # in words that it was given
        if not going_on.is_again and (has_strayed or splice.has_strayed or is_refused(outcome)):
            is_certain = has_strayed or (is_refused(outcome) and sent.path == CHAT_PATH)
            if is_certain and not self._answer.generation.is_in_doubt:
                begins.stop_asking(outcome)
            self._answer.generation = self._answer.generation.without_words()
            splice = Splice(self._request.passage, sent, again(half))
            outcome = await self.ask(splice)
        if self._answer.generation.has_strayed or splice.has_strayed:
            self._answer.generation.has_strayed = True
            begins.note_lost("its engine writes another answer")
            return self._request.broken or NOT_CONTINUED
        return outcome

    async def ask(self, splice: Splice | None = None, longer: bytes | None = None) -> Outcome:
        """Ask once, with ``splice`` for the rest of an answer; return how it ended."""
        body = longer or self._body
        settings, request, answer = self._settings, self._request, self._answer
        going_on = None if splice is None else splice.going_on
        answer.is_mute = not request.is_streamed
        answer.begin_generation(settings.repetition, request.chars, going_on)
        refused = None if settings.admit_prompt is None else await _admit(settings.admit_prompt, request, answer, body)
        if refused is not None:
            return refused
        whose = request.owner or "" if settings.is_others else None

        async def ask() -> None:
            answer.begin_again(settings.repetition, request.chars, going_on)
            passage = self._passage_to(request.passage if splice is None else splice)
            try:
                if splice is None:
                    return await self._client.relay(request.path, body, answer.generation, passage, whose)
                with anyio.CancelScope() as scope:
                    splice.stop = scope.cancel
                    return await self._client.relay(request.path, body, answer.generation, passage, whose)
            finally:
                answer.phase = Phase.US  # until it is asked again the engine's silence means nothing

        def has_begun() -> bool:
            return request.passage.has_begun or answer.generation.first_token_at is not None

        goes_on = going_on is not None and not going_on.is_again
        excuse = None if goes_on else settings.excuse  # it is asked for all of it instead
        failed = await ask_fairly(ask, has_begun, excuse, is_others=settings.is_others, is_passed_on=True)
        if failed is not None and goes_on and (outcome := declined(failed, answer.generation)) is not None:
            return outcome
        if failed is not None:
            return _failure_of(failed, settings, request)
        for each in self._held_back:
            each.flush()
        return Completed(finish_reason=answer.generation.finish_reason or "unknown")

    def _passage_to(self, passage: Passage) -> Passage:
        """Return the passage for one answer."""
        self._held_back = []
        if self._request.own_tokens is not None:
            self._held_back.append(veil := CacheVeil(passage, self._request.own_tokens))
            passage = veil
        if self._model != self._request.model:
            self._held_back.insert(0, renaming := Renaming(passage, self._model, self._request.model))
            passage = renaming
        return passage


async def _admit(admit: AdmitPrompt, request: Relay, answer: Answer, body: bytes) -> Outcome | None:
    later = 0 if request.is_streamed else request.most_tokens or UNBOUNDED
    return await admit(answer, request.chars, body if request.path == CHAT_PATH else None, later)


def _failure_of(error: EngineError, settings: RequestSettings, request: Relay, *, is_passed: bool = True) -> Outcome:
    """Return the ending for an error; most refusals have been passed on as they came, if it ``is_passed``."""
    passage = request.passage
    if not isinstance(error, EngineRejected):
        return broken_off(error)
    if isinstance(error, RequestAtFault) or not is_passed:
        passage.pass_whole(error.status, JSON, encode_error(error))
    if settings.admit_prompt is not None and isinstance(error, CacheFull):
        return Cancelled(reason=CancelReason.CACHE_FULL)
    return rejected(error, is_about_the_request=is_about_the_request(error))


class Renaming:
    """A passage that replaces the engine's name of a model by the one that its client knows.

    The name is found with its JSON key: within a text the quotes would be escaped. An incomplete line is kept until it
    is complete, or until the end.
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
        """Pass on the whole lines."""
        self._content_type = content_type
        whole = self._lines.cut(frames)
        if whole:
            self._passage.pass_frames(content_type, self._renamed(whole))

    def flush(self) -> None:
        """Pass on the unfinished line."""
        rest = self._lines.take_rest()
        if rest:
            self._passage.pass_frames(self._content_type, self._renamed(rest))

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Pass on a whole answer."""
        self._passage.pass_whole(status, content_type, self._renamed(body))

    def _renamed(self, text: bytes) -> bytes:
        for written, wanted in self._pairs:
            text = text.replace(written, wanted)
        return text


def _chat_of(body: bytes, records: TokenDetail | None) -> ChatRequest:
    fields = msgspec.json.decode(body)
    return ChatRequest(
        model=fields.pop("model"),
        messages=(),
        posted=fields.pop("messages"),
        tools=tuple(fields.pop("tools", None) or ()),
        params=fields,
        records=records,
    )


def _translated(body: bytes, ours: Mapping[str, object]) -> bytes:
    """Return a body with some fields of ours; all others keep their order and their text.

    Raises:
        BodyUnusable: a name in it is not text, which the first look at it does not check.
    """
    fields: dict[str, object] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    salt, ours_salt = fields.get("cache_salt"), ours.get("cache_salt")
    if isinstance(salt, msgspec.Raw) and ours_salt is not None:
        ours = {**ours, "cache_salt": f"{msgspec.json.decode(salt)}.{ours_salt}"}
    return msgspec.json.encode({**fields, **ours})
