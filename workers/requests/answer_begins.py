"""Whether one engine goes on with half an answer, and how it is asked to.

What its template makes of the beginning is read before each request: a template that rewrites it would change the
answer without a word. An incarnation that knows no such question, or goes on with other words, is not asked again.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from transport.client import EngineClient
from transport.dialects.frame_parts import COMPLETIONS_PATH
from transport.dialects.openai import CHAT_PATH
from transport.errors import EngineError, EngineRejected, EngineUnreachable
from transport.request import BegunAnswer, ChatRequest
from workers.outcome import Outcome, RequestFailed
from workers.requests.halves import MOST_FRUITLESS, GoingOn, HalfAnswer, constraint_in, obstacle_in, rest_of, stops_in
from workers.requests.sent import SentStream

UNKNOWN_PATH: Final = frozenset({404, 405, 501})
ANYTHING: Final = {"role": "user", "content": "."}  # a prompt for a template
logger = logging.getLogger(__name__)


class AnswerBegins:
    """The beginnings of answers that one worker's engine is asked to go on with; ``incarnation`` is its number."""

    def __init__(self, worker: str, client: EngineClient, incarnation: Callable[[], int]) -> None:
        self._worker = worker
        self._client = client
        self._incarnation = incarnation
        self._refused_by: int | None = None
        self.refusals = 0
        self.fault: str | None = None  # why the present engine is not asked to go on

    def __repr__(self) -> str:
        return f"<AnswerBegins {self._worker} fault={self.fault}>"

    async def prepare_chat(self, chat: ChatRequest, half: HalfAnswer) -> tuple[ChatRequest, GoingOn] | None:
        """Return the request to go on with half an answer; None if the engine must write it from its beginning.

        Raises:
            EngineUnreachable: the engine is gone.
        """
        encode, params = self._client.dialect.encode, chat.params
        fault = obstacle_in(params) or _vain(half)
        for shorter in (half, half.shortened()):  # all tokens may have come, but not the end of the answer
            begun = shorter.begun(stops_in(params))
            if fault is not None or begun is None:
                break
            asked = replace(chat, begun=begun)
            tokens, fault = await self._read(begun, encode(chat), encode(asked))
            rest = rest_of(params, tokens)
            if fault is None and rest is not None:
                return replace(asked, params=rest), self._going_on(begun, tokens)
        self._refuse(half, fault)
        return None

    async def prepare_body(self, body: bytes, half: HalfAnswer, sent: SentStream) -> tuple[bytes, GoingOn]:
        """Return the body of a stream to go on with half its answer, or to write all of it again.

        Its client has all of the half. Where a template cuts off blanks at its end, the engine writes them again. A
        completion has no template: its prompt gets longer.

        Raises:
            EngineUnreachable: the engine is gone.
        """
        fields, query = msgspec.json.decode(body), self._client.dialect.begun
        fault = obstacle_in(fields) or constraint_in(fields) or _vain(half) or _obstacle_to(half, sent)
        if sent.path != CHAT_PATH and _has_own_beginning(fields):  # a template shows it for chats
            fault = "its client has begun the answer itself"
        if sent.path == COMPLETIONS_PATH and query is not None and fault is None:
            tokens = max(half.tokens, await self._count(fields, half.whole.text))
            rest = _longer(fields, half, tokens)
            if rest is not None:
                return msgspec.json.encode(rest), GoingOn(begun=half.whole, tokens=tokens, echoes=False)
        asks = {} if query is None else {CHAT_PATH: query.ask, **query.asks}
        begins = dict.fromkeys((half.whole, half.begun(()))) if sent.path in asks and fault is None else {}
        for begun in begins:
            if query is None or begun is None or not (begun.text or begun.reasoning):
                break
            asked = dict(fields)
            asks[sent.path](asked, begun)
            chat = fields if sent.path == CHAT_PATH else {"model": fields.get("model"), "messages": [ANYTHING]}
            whole = dict(chat)
            query.ask(whole, begun)
            tokens, fault = await self._read(begun, msgspec.json.encode(chat), msgspec.json.encode(whole))
            rest = rest_of(asked, tokens)
            if fault is None and rest is not None:
                surplus = half.whole.text.removeprefix(begun.text)
                return msgspec.json.encode(rest), replace(self._going_on(begun, tokens), surplus=surplus)
        return body, again(half)

    async def _read(self, begun: BegunAnswer, without: bytes, whole: bytes) -> tuple[int, str | None]:
        """Return the tokens of a beginning, and why the engine does not go on with it, or None.

        Raises:
            EngineUnreachable: it is gone.
        """
        if self._refused_by != self._incarnation():
            self._refused_by = self.fault = None
        if self.fault is not None:
            return 0, self.fault
        try:
            reading = await self._client.ask_about_beginnings(
                lambda query, post: query.read(post, begun, without, whole)
            )
        except EngineUnreachable:
            raise
        except EngineError as error:
            if isinstance(error, EngineRejected) and error.status in UNKNOWN_PATH:
                self._switch_off(str(error))
            return 0, str(error)  # about this prompt: too long, say, or one that the template refuses
        if reading is None:
            return 0, "engines of its kind do not go on with half an answer"
        return reading.tokens, reading.fault

    async def _count(self, fields: Mapping[str, object], text: str) -> int:
        """Return the tokens of a text: a piece of it may have several."""
        try:
            model = fields.get("model")
            return await self._client.ask_about_beginnings(lambda query, post: query.count(post, model, text)) or 0
        except EngineUnreachable:
            raise
        except EngineError:
            return 0  # its pieces are counted

    def _going_on(self, begun: BegunAnswer, tokens: int) -> GoingOn:
        query = self._client.dialect.begun
        return GoingOn(begun=begun, tokens=tokens, echoes=query is not None and query.echoes)

    def _refuse(self, half: HalfAnswer, fault: str | None) -> None:
        if half.text or half.reasoning:
            self.note_lost(str(fault))

    def note_refused(self, outcome: Outcome | None, *, is_certain: bool = True) -> None:
        """Record that half an answer was lost: the present engine refused to go on, or went on with other words."""
        self.refusals += 1
        if is_certain:
            self.stop_asking(outcome)

    def note_lost(self, fault: str) -> None:
        """Record that half an answer was lost."""
        self.refusals += 1
        logger.info("worker %s: half an answer does not go on: %s", self._worker, fault)

    def stop_asking(self, outcome: Outcome | None) -> None:
        """Ask the present engine no more to go on: it has refused, or went on with other words."""
        strayed = "the engine goes on with other words than the beginning of the answer"
        self._switch_off(outcome.detail if isinstance(outcome, RequestFailed) else strayed)

    def _switch_off(self, fault: str) -> None:
        self._refused_by, self.fault = self._incarnation(), fault
        logger.warning("worker %s: answers that break off do not go on: %s", self._worker, fault)


def again(half: HalfAnswer) -> GoingOn:
    """Return the way for an engine that writes all of an answer again."""
    return GoingOn(begun=half.whole, tokens=half.tokens, echoes=True, is_again=True)


def _vain(half: HalfAnswer) -> str | None:
    return f"{half.fruitless} attempts to go on added nothing" if half.fruitless >= MOST_FRUITLESS else None


def _obstacle_to(half: HalfAnswer, sent: SentStream) -> str | None:
    """Return the part of a stream after which no engine goes on from its words; None without one."""
    if sent.ended:
        return "its last words were said"
    texts, thoughts = sent.words_where(are_thoughts=False), sent.words_where(are_thoughts=True)
    if texts != [half.whole.text] * bool(half.text) or set(thoughts) - {half.whole.reasoning}:
        return "its client has other words"
    if half.reasoning and sent.path != CHAT_PATH:
        return "it has a thought"
    has_calls = len(sent.words) > len(texts) + len(thoughts)
    return "it has a call before words" if has_calls and not half.text else None


def _has_own_beginning(fields: Mapping[str, object]) -> bool:
    """Whether a client's body ends with a beginning of the answer: a second one cannot follow it."""
    given = fields.get("messages", fields.get("input"))
    last = given[-1] if isinstance(given, list) and given else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _longer(fields: Mapping[str, object], half: HalfAnswer, tokens: int) -> dict[str, object] | None:
    """Return the fields of a completion whose prompt has the text so far; None if they make that another request."""
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or fields.get("echo") or fields.get("suffix"):
        return None
    return rest_of({**fields, "prompt": prompt + half.whole.text}, tokens)
