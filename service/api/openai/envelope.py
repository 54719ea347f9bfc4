"""The envelope of a posted body: the fields that the service needs. The rest is for the engine.

Source: specification, "Front door".
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw, Struct

from service.api.errors.forms import CHAT, NATIVE, NEEDS, RESPONSES
from service.errors import BodyMalformed, InvalidParameter
from transport.answer_bound import laid_over
from transport.errors import UNDECODABLE

MARK_BYTES: Final = 16
CHUNK: Final = 1024  # a prompt that is one text is recognised in whole chunks of this many bytes
MOST_MARKS: Final = 512  # marks that are looked up; older ones cover less of the prompt
SMALL_BYTES: Final = 16 * 1024  # largest body that is parsed in the event loop
# Pictures and sounds: a thousand letters without a space or a sign of JSON are not words. The lookbehind tries a run
# only at its start: trying it at each letter takes quadratic time for runs that are just too short.
_BINARY: Final = re.compile(rb"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/_=-]{1024,}+")
_BINARY_END: Final = re.compile(rb"[^A-Za-z0-9+/_=-]")
BINARY_CHARS: Final = 2048  # characters that such a run counts as
WINDOW: Final = 64 * 1024  # bytes that one search covers
_WITHIN_CHARACTERS: Final = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that do not begin a character
_NOTHING: Final = Raw(b"null")
BOUNDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")  # bounds of an answer
READ: Final = {CHAT: ("max_tokens", "max_completion_tokens"), RESPONSES: ("max_output_tokens",)}  # else max_tokens
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
    """The part of a body that routing needs; ``chars`` is its prompt's rough length, ``answers`` their number."""

    model: str | None
    is_streamed: bool
    answers: int
    most_tokens: int | None
    chars: int
    marks: tuple[bytes, ...]


def open_envelope(
    body: bytes, path: str, session: str | None, owner: str | None = None, *, is_apart: bool = False
) -> Envelope:
    """Read the fields of a body that the service needs; ``session`` is the client's name for its program, or None.

    A session belongs to ``owner``, the key: another key may use the same name. Marks of prompts are shared across keys
    unless ``is_apart``.

    Raises:
        BodyMalformed: it is not a JSON object, or one of these fields has an unusable type.
    """
    try:
        if not body.isascii():
            _check_text(body)  # raw fields are not decoded here, nor all names
        read = _decode(body)
    except msgspec.ValidationError as error:
        raise BodyMalformed(f"the body cannot be used: {error}") from error
    except UNDECODABLE as error:
        raise BodyMalformed(f"the body is not usable JSON: {error}") from error
    for is_broken, message in _rules(read, path):
        if is_broken:
            raise BodyMalformed(f"the body cannot be used: {message}")
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


def _rules(read: _Body, path: str) -> Iterator[tuple[bool, str]]:
    yield read.n is not None and read.n < 1, "n must be a whole number from 1"
    yield read.background not in (_NOTHING, Raw(b"false")), "background is not supported; leave it out"
    if path in NEEDS:
        yield read.messages == _NOTHING, "messages is required"
        is_list = bytes(read.messages).startswith(b"[")  # llama.cpp takes {} for an empty list
        yield not is_list, "messages must be a list"


def fill_body(body: bytes, path: str, params: Mapping[str, object], *, reads_all: bool = True) -> bytes:
    """Return a body with those of a model's ``params`` that it lacks; the rest stays as written.

    No bound on the answer is added where the body has any that the engine reads; llama.cpp ``reads_all`` names. An
    added bound has the name that the path's API uses.

    Raises:
        BodyMalformed: it cannot be decoded.
    """
    try:
        given = _decode_fields(body)
    except UNDECODABLE as error:
        raise BodyMalformed(f"the body is not usable JSON: {error}") from error
    said = {name for name, value in given.items() if value != _NOTHING}
    has_bound = not said.isdisjoint(BOUNDS if reads_all else READ.get(path, ("max_tokens",)))
    more: dict[str, object] = {}
    for name, value in laid_over({}, params).items():
        if name in BOUNDS and not has_bound:
            more.setdefault({RESPONSES: "max_output_tokens", NATIVE: "n_predict"}.get(path, "max_tokens"), value)
        elif name not in BOUNDS and name not in said:
            more[name] = value
    return msgspec.json.encode({**given, **more}) if more else body


def _check_text(body: bytes) -> None:
    """Check that bytes are UTF-8, as JSON requires.

    Raises:
        UnicodeDecodeError: they are not.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(body), WINDOW):
        decoder.decode(body[at : at + WINDOW])
    decoder.decode(b"", final=True)


def _chars_of(texts: bytes) -> int:
    """Count the characters of a prompt, a window at a time, so that a long body does not block the interpreter."""
    count = at = 0
    while at < len(texts):
        window = texts[at : at + WINDOW]
        found = _BINARY.search(texts, at, at + WINDOW)
        end = at + len(window) if found is None else found.start()
        if found is None and end < len(texts):  # a run may begin in this window and continue in the next
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


def _number(raw: Raw) -> int | None:
    """Return a number in a body; None for anything else, which is left to the engine."""
    try:
        return int(_decode_number(raw))
    except (*UNDECODABLE, OverflowError):
        return None


def _text(raw: Raw) -> str | None:
    try:
        return _decode_text(raw)
    except UNDECODABLE:  # a raw field is not decoded yet: it may not be text
        return None


def _prompts(prompt: Raw) -> int:
    """Count the prompts of a completions request, which may hold several."""
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
    """Yield a program's marks, the surest first: its name, or digests of the whole prompt and of ever less of it."""
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
        if number >= count - MOST_MARKS:  # older marks are not looked up
            marks.append(root.digest())
    yield from reversed(marks)


def may_continue(header: str | None) -> bool:
    """Whether a stream may go on when its engine has broken off.

    Raises:
        InvalidParameter: the header is neither on nor off.
    """
    if header not in (None, "on", "off"):
        raise InvalidParameter(f"x-roundhouse-continue: {header[:40]!r} is neither on nor off")
    return header != "off"
