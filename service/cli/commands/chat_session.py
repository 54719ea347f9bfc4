"""A chat's session: its messages, and a service's answers to them over HTTP."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final

import httpx
import msgspec

from roundhouse_client.values.models import Model
from service.cli.commands.own_service import FoundService
from service.cli.connection import AnswerRefused, ServiceAway
from service.cli.displays.console import part
from transport.events import Event, Finished, ReasoningDelta, TextDelta, Usage
from transport.stream import ChatStream

PATH: Final = "/v1/chat/completions"
CONNECT_S: Final = 10.0
SILENCE_S: Final = 600.0  # longest silence of a stream; a waiting one gets a comment every few seconds
MOST_ERROR_BYTES: Final = 64 * 1024
MS: Final = 1000.0
USUAL: Final[Mapping[str, object]] = {"max_tokens": 1024}
WAIT: Final = "wait_ms="
ENDINGS: Final = {"length": "cut off at max_tokens"}


class ChatAnswer(msgspec.Struct):
    """The text of an answer so far, and its cost; ``waited_s`` is the wait for a slot, None until it is known."""

    text: str = ""
    usage: Usage | None = None
    ending: str = ""
    waited_s: float | None = None
    worker: str = ""
    seconds: float = 0.0

    def take(self, events: list[Event]) -> Iterator[Event]:
        """Take the events of a piece, and yield those that a person reads."""
        for event in events:
            match event:
                case TextDelta():
                    self.text += event.text
                    yield event
                case ReasoningDelta():
                    yield event
                case Usage():
                    self.usage = event
                case Finished():
                    self.ending = event.reason
                case _:
                    pass

    @property
    def cost(self) -> str:
        """Tokens, pace and wait on one line."""
        parts = []
        if self.usage is not None:
            pace = part(" ({:.0f}/s)", self.usage.completion_tokens / (self.seconds or math.inf))
            parts.append(f"{self.usage.completion_tokens} tokens in {self.seconds:.1f} s{pace}")
            parts.append(f"{self.usage.prompt_tokens} read, {self.usage.cached_tokens} of them from the cache")
        if self.waited_s is not None:
            parts.append(f"waited {self.waited_s:.1f} s")
        return " · ".join(filter(None, (*parts, self.worker, ENDINGS.get(self.ending))))


class Chat:
    """A conversation of one person with one model; the service stores none of it."""

    def __init__(self, service: FoundService) -> None:
        self._service = service
        headers = {} if service.api_key is None else {"Authorization": f"Bearer {service.api_key}"}
        # One session id brings each question to the engine that has the conversation in its cache.
        headers["X-Session-Id"] = f"chat-{os.getpid()}-{int(time.time())}"
        limits = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        self._http = httpx.Client(base_url=service.url, headers=headers, timeout=limits, trust_env=False)
        self.model = service.model
        self.system = ""
        self.params: dict[str, object] = dict(USUAL)
        self.messages: list[dict[str, str]] = []

    def __repr__(self) -> str:
        return f"<Chat with {self.model.id}, {len(self.messages)} messages>"

    @property
    def models(self) -> tuple[Model, ...]:
        """All models that the chat can switch to."""
        return self._service.models

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def ask(self, text: str, show: Callable[[Event], None]) -> ChatAnswer:
        """Ask, and show the answer as it comes; Ctrl-C ends it, and its text so far stays in the conversation.

        Raises:
            AnswerRefused: there is no answer; the conversation is as it was before.
            ServiceAway: the service does not answer.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ChatAnswer()
        try:
            with suppress(KeyboardInterrupt):
                self._receive(answer, show)
        except (AnswerRefused, ServiceAway):
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def take_back(self) -> str | None:
        """Forget the last answer with its question, and return the question; None where there is none."""
        if not self.messages:
            return None
        self.messages.pop()
        return self.messages.pop()["content"]

    def _receive(self, answer: ChatAnswer, show: Callable[[Event], None]) -> None:
        stream, began_at = ChatStream(), None
        try:
            with self._http.stream("POST", PATH, json=self._body()) as reply:
                if reply.status_code != HTTPStatus.OK:
                    raise AnswerRefused(_words(reply))
                answer.worker = reply.headers.get("X-Roundhouse-Worker", "")
                answer.waited_s = _seconds(reply.headers.get("X-Roundhouse-Wait-Ms"))
                for piece in reply.iter_bytes():
                    if answer.waited_s is None:
                        answer.waited_s = _wait_in(piece)
                    for event in answer.take(stream.feed(piece)):
                        began_at = began_at or time.monotonic()
                        answer.seconds = time.monotonic() - began_at
                        show(event)
                list(answer.take(stream.close()))
        except httpx.HTTPError as error:
            raise ServiceAway(
                f"the service at {self._service.url} went away: {str(error) or type(error).__name__}"
            ) from error
        if stream.failure is not None:
            raise AnswerRefused(str(stream.failure))

    def _body(self) -> dict[str, object]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {**self.params, "model": self.model.id, "messages": [*system, *self.messages], **usage}


def _words(reply: httpx.Response) -> str:
    """Return the message of a refusal."""
    read = bytearray()
    for piece in reply.iter_bytes():
        read += piece[: MOST_ERROR_BYTES - len(read)]
    try:
        error = json.loads(bytes(read))["error"]
        return str(error["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"status {reply.status_code}"


def _wait_in(piece: bytes) -> float | None:
    """Return the wait from a stream's comment, which reports it if the headers went out too early."""
    _, mark, rest = piece.partition(WAIT.encode())
    return _seconds(rest.split(b" ", 1)[0].decode("ascii", "replace")) if mark else None


def _seconds(ms: str | None) -> float | None:
    return float(ms) / MS if ms is not None and ms.isascii() and ms.isdigit() else None
