"""The tokens of one recorded answer: their ids, their logprobs, and whether they are whole. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from transport.events import PromptRendered, TokensWritten, Usage

LEAST: Final = -3.4e38  # logprob that 32 bits hold
MOST: Final = 1e-3  # logprob, for rounding above 0
HALF_CHARACTER: Final = "\ufffd"  # stands for bytes that make no character yet
CUT_OFF: Final = frozenset({"length", "max_tokens"})


class Lacking(StrEnum):
    """The part of a recorded answer that is not whole."""

    PROMPT = "prompt"  # the ids of its prompt are not known, or not as many as the engine counted
    IDS = "ids"  # its ids do not decode to its text, or are not as many as the engine counted
    LOGPROBS = "logprobs"  # some of its tokens have none
    STORE = "store"  # the store had no room for its arrays


class RecordedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one prompt and its answer as the engine had them.

    ``versions`` are spans of the answer that one version of the weights has written: version, first token, token after
    the last. ``params`` are the generation parameters as they were sent. If it ``is_masked``, its logprobs are those
    after a constraint.
    """

    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float | None] | None
    versions: Sequence[tuple[int, int, int]] = ()
    stop_reason: str | None = None
    params: dict[str, object] = {}
    partial: tuple[Lacking, ...] = ()
    is_masked: bool = False


class TokenRecord:
    """Collects the tokens of one generation; ``prompt`` is None until the engine has sent them."""

    __slots__ = ("_texts", "changes", "ids", "logprobs", "prompt", "rendered", "stop_word")

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.rendered: str | None = None  # the prompt as the engine renders it before the answer
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self._texts: list[str] | None = []
        self.stop_word: str | None = None  # it has ended the answer
        self.changes: list[tuple[int, int]] = []  # tokens written when the weights changed, and the version before

    def __repr__(self) -> str:
        return f"<TokenRecord ids={len(self.ids)}>"

    def add(self, event: PromptRendered | TokensWritten) -> None:
        """Take the prompt, or more tokens of the answer."""
        if isinstance(event, PromptRendered):
            self.prompt = event.ids
            return
        self.ids += event.ids
        self.stop_word = event.stop_word or self.stop_word
        self.logprobs += map(_known, event.logprobs or [None] * len(event.ids))
        if len(event.texts) != len(event.ids):
            self._texts = None
        elif self._texts is not None:
            self._texts += event.texts

    def note_weights(self, before: int) -> None:
        """Record that the weights change; ``before`` is the version that has written the tokens so far."""
        self.changes.append((len(self.ids), before))

    def decodes_to(self, text: str, stops: Sequence[str], reason: str | None) -> bool:
        """Whether the texts of its tokens, one by one, are the text of the answer: no engine need be asked."""
        if self._texts is None:
            return False
        return is_text_of("".join(self._texts), "".join(self._texts[:-1]), text, stops, reason)

    def recorded(
        self,
        usage: Usage | None,
        *,
        is_text: bool,
        has_logprobs: bool,
        version: int | None,
        reason: str | None,
        params: dict[str, object],
    ) -> RecordedTokens:
        """Return the tokens of the whole answer; ``is_text`` says whether they decode to its text."""
        prompt = self.prompt
        counts = (usage.prompt_tokens, usage.completion_tokens) if usage is not None else (None, None)
        lacking = []
        if prompt is None or len(prompt) != counts[0]:
            lacking.append(Lacking.PROMPT)
        if not is_text or len(self.ids) != counts[1]:
            lacking.append(Lacking.IDS)
        if has_logprobs and any(each is None for each in self.logprobs):
            lacking.append(Lacking.LOGPROBS)
        return RecordedTokens(
            prompt=prompt or [],
            ids=self.ids,
            logprobs=self.logprobs if has_logprobs else None,
            versions=_spans(self.changes, len(self.ids), version),
            stop_reason=reason,
            params=params,
            partial=tuple(lacking),
        )


def _known(logprob: float | None) -> float | None:
    """Return a logprob that the store can hold, None for what is none."""
    return logprob if logprob is not None and LEAST <= logprob <= MOST else None


def logprobs_mode(args: Mapping[str, object]) -> str:
    """Return the kind of an engine's logprobs in vLLM's words; llama.cpp's are of the model, before sampling."""
    mode = args.get("logprobs_mode", args.get("logprobs-mode"))
    return str(mode or "raw_logprobs").removesuffix("_logprobs")


def is_text_of(decoded: str, before_last: str, text: str, stops: Sequence[str], reason: str | None) -> bool:
    """Whether the decoded tokens of an answer are its text.

    An end of the answer (``before_last`` is the text without the last token), a stop word or half a character may
    follow: engines send none of them. Blanks around the text do not count, since tokenizers add and drop them.
    """
    said = text.strip()
    if decoded.strip() == said:
        return True
    if reason in CUT_OFF:
        return decoded.strip().rstrip(HALF_CHARACTER).strip() == said
    if before_last.strip() == said:
        return True
    start = decoded.lstrip()
    rest = start.removeprefix(said).lstrip() if start.startswith(said) else ""
    return any(rest.startswith(stop.strip()) for stop in stops if stop.strip())


def holds(decoded: str, parts: Sequence[str]) -> bool:
    """Whether decoded tokens hold these parts in order, as where a server has taken thoughts and calls apart."""
    place = 0
    for part in parts:
        found = decoded.find(part.strip(), place)
        if found < 0:
            return False
        place = found + len(part.strip())
    return True


def _spans(changes: Sequence[tuple[int, int]], tokens: int, version: int | None) -> list[tuple[int, int, int]]:
    if version is None:
        return []
    spans: list[tuple[int, int, int]] = []
    start = 0
    for written, before in changes:
        if written > start:
            spans.append((before, start, written))
            start = written
    return [*spans, (version, start, tokens)] if tokens > start else spans
