"""The envelope of a posted body: its model, and its size. The rest is the engine's.

Source: specification, "Front door".
"""

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw, Struct

from service.api.errors.forms import NATIVE, NEEDS, RESPONSES
from service.errors import BodyMalformed
from transport.dialects.openai import UNDECODABLE

MARK_BYTES: Final = 16
CHUNK: Final = 1024  # bytes of a prompt that is one text: it is known up to the last whole chunk
MOST_MARKS: Final = 512  # that are looked up: older ones are the shorter ones
SMALL_BYTES: Final = 16 * 1024  # of a body that is looked at in the event loop
# Of pictures and sounds: a thousand letters without a space or a sign of JSON are no words. A run is tried once, from
# its beginning: from each of its letters, runs of a thousand less one took their length squared.
_BINARY: Final = re.compile(rb"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/_=-]{1024,}+")
_BINARY_END: Final = re.compile(rb"[^A-Za-z0-9+/_=-]")
BINARY_CHARS: Final = 2048  # that such a piece counts as
WINDOW: Final = 64 * 1024  # bytes that a pattern looks at in one go
_WITHIN_CHARACTERS: Final = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin none
_NOTHING: Final = Raw(b"null")
BOUNDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")  # on an answer
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_number = msgspec.json.Decoder(float).decode
_decode_text = msgspec.json.Decoder(str).decode


class _Body(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    background: Raw = _NOTHING
    n: int | float | None = None  # 3.0 is 3 to engines
    max_tokens: Raw = _NOTHING
    max_completion_tokens: Raw = _NOTHING
    max_output_tokens: Raw = _NOTHING
    n_predict: Raw = _NOTHING
    prompt_cache_key: Raw = _NOTHING
    system: Raw = _NOTHING
    instructions: Raw = _NOTHING
    tools: Raw = _NOTHING
    messages: Raw = _NOTHING
    prompt: Raw = _NOTHING
    input: Raw = _NOTHING
    content: Raw = _NOTHING


_decode = msgspec.json.Decoder(_Body).decode


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A body as far as routing needs it; ``chars`` is about its prompt's length, ``answers`` how many it asks for."""

    model: str | None
    is_streamed: bool
    answers: int
    most_tokens: int | None
    chars: int
    marks: Sequence[bytes]


def open_envelope(
    body: bytes, path: str, session: str | None, owner: str | None = None, *, is_apart: bool = False
) -> Envelope:
    """Read the fields of a body that the service needs; ``session`` is the client's name for its program, if any.

    Such a name is one of ``owner``'s, the key: clients of others may have chosen the same. What was said is known for
    any key's, unless it ``is_apart``.

    Raises:
        BodyMalformed: it is no JSON object, or one of these fields is of no usable kind.
    """
    try:
        if not body.isascii():
            _check_text(body)  # what is kept raw is not looked at, and names are read when some are ours
        read = _decode(body)
    except msgspec.ValidationError as error:
        raise BodyMalformed(f"the body cannot be used: {error}") from error
    except UNDECODABLE as error:
        raise BodyMalformed(f"the body is not usable JSON: {error}") from error
    if read.n is not None and read.n < 1:
        raise BodyMalformed("the body cannot be used: n has to be a number from 1")
    if read.background not in (_NOTHING, Raw(b"false")):
        raise BodyMalformed("the body cannot be used: background: answers are given while one waits; leave it out")
    if path in NEEDS and read.messages == _NOTHING:
        raise BodyMalformed("the body cannot be used: messages: has to be given")
    if path in NEEDS and not bytes(read.messages).startswith(b"["):  # llama.cpp takes {} for an empty list
        raise BodyMalformed("the body cannot be used: messages: must be a list")
    asked = next((each for each in (read.messages, read.prompt, read.input, read.content) if each != _NOTHING), None)
    texts = b"" if asked is None else bytes(asked)
    bounds = map(_number, (read.max_completion_tokens, read.max_tokens, read.max_output_tokens, read.n_predict))
    return Envelope(
        model=read.model or None,
        is_streamed=bool(read.stream),
        answers=int(read.n or 1) * _prompts(read.prompt),
        most_tokens=next((bound for bound in bounds if bound is not None and bound > 0), None),
        chars=_chars_of(texts),
        marks=tuple(_marks(read, texts, path, session, owner, is_apart=is_apart)),
    )


def fill_body(body: bytes, path: str, params: Mapping[str, object]) -> bytes:
    """Return a body with what a model's ``params`` say and it does not; the rest stays as it was written.

    One bound on the answer is as good as another: where it has any, none is added. Its name is that of the surface.

    Raises:
        BodyMalformed: a name in it is no text.
    """
    try:
        given = _decode_fields(body)
    except UNDECODABLE as error:
        raise BodyMalformed(f"the body is not usable JSON: {error}") from error
    said = {name for name, value in given.items() if value != _NOTHING}
    has_bound = not said.isdisjoint(BOUNDS)
    more: dict[str, object] = {}
    for name, value in params.items():
        if name in BOUNDS and not has_bound:
            more.setdefault({RESPONSES: "max_output_tokens", NATIVE: "n_predict"}.get(path, "max_tokens"), value)
        elif name not in BOUNDS and name not in said:
            more[name] = value
    return msgspec.json.encode({**given, **more}) if more else body


def _check_text(body: bytes) -> None:
    """Check that bytes are UTF-8, as JSON is.

    Raises:
        UnicodeDecodeError: they are not.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(body), WINDOW):
        decoder.decode(body[at : at + WINDOW])
    decoder.decode(b"", final=True)


def _chars_of(texts: bytes) -> int:
    """Count the characters of a prompt, a window at a time: the longest body must not hold the interpreter for long."""
    count = at = 0
    while at < len(texts):
        window = texts[at : at + WINDOW]
        found = _BINARY.search(texts, at, at + WINDOW)
        end = at + len(window) if found is None else found.start()
        if found is None and end < len(texts):  # a run may begin in this window, and be long enough in the next
            tail = window.rfind(b" ", len(window) - 1024)
            end = at + tail + 1 if tail >= 0 else end
        count += len(texts[at:end].translate(None, _WITHIN_CHARACTERS))
        at = end
        if found is not None:
            count += BINARY_CHARS
            at = _run_end(texts, found.end())
    return count


def _run_end(texts: bytes, at: int) -> int:
    while at < len(texts):
        found = _BINARY_END.search(texts, at, at + WINDOW)
        if found is not None:
            return found.start()
        at += WINDOW
    return len(texts)


def _number(told: Raw) -> int | None:
    """Return a number that a body tells; what is none is for the engine to refuse, or to take as it likes."""
    try:
        return int(_decode_number(told))
    except (*UNDECODABLE, OverflowError):
        return None


def _text(told: Raw) -> str | None:
    try:
        return _decode_text(told)
    except UNDECODABLE:  # what is kept raw has not been looked at: it may be no UTF-8
        return None


def _prompts(prompt: Raw) -> int:
    """Count the prompts of a request for completions, which may hold several."""
    several = _listed(bytes(prompt)) if prompt != _NOTHING else None
    return max(1, sum(bytes(each)[:1] in (b'"', b"[") for each in several)) if several else 1


def _listed(text: bytes) -> list[Raw] | None:
    if not text.startswith(b"["):
        return None
    try:
        return _decode_list(text)
    except UNDECODABLE:
        return None


def _marks(
    read: _Body, texts: bytes, path: str, session: str | None, owner: str | None, *, is_apart: bool
) -> Iterator[bytes]:
    """Yield what a program is known by, the surest first: its name, or all that was said, then ever less of it."""
    root = blake2b(digest_size=MARK_BYTES)
    root.update(repr((read.model, path if session is None else None)).encode())
    root.update(repr(owner).encode() if is_apart else b"")
    named = session or _text(read.prompt_cache_key)
    if named is not None:
        root.update(repr((owner, session is None)).encode() + named.encode("utf-8", "replace"))
        yield root.digest()
        return
    for part in (read.system, read.instructions, read.tools):
        root.update(b"%d " % len(bytes(part)) + bytes(part))
    listed = _listed(texts)
    count = len(texts) // CHUNK if listed is None else len(listed)
    marks: list[bytes] = []
    for number in range(count):
        root.update(texts[number * CHUNK : (number + 1) * CHUNK] if listed is None else bytes(listed[number]))
        root.update(b"\n")
        if number >= count - MOST_MARKS:  # older ones are not looked up
            marks.append(root.digest())
    yield from reversed(marks)
