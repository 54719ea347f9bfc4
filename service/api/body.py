"""Posted bodies, bounded in size and depth before they are decoded."""

import re
from collections.abc import Awaitable, Callable
from threading import Event
from typing import Any, Final

import anyio.to_thread
import msgspec
from fastapi import Request
from msgspec.structs import replace
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from service.conversations.document.limits import Limits
from service.errors import BodyMalformed, BodyTooLarge, ConfigError, InvalidJob, QueueFull
from service.formats.documents import lines_in, parse_json
from service.formats.faults import nearest_path
from service.formats.yaml_json import yaml_to_json
from service.node.large_documents import SMALL_BYTES
from workers.errors import OffloadCrowded
from workers.offload.pool import Purpose, offload

HELD: Final = "roundhouse.held_body"  # key in an ASGI scope
SHARE: Final = 2  # bodies of requests under way may hold this multiple of ``limits.queue_bytes``
AGAIN_S: Final = 2
COUNT_LIMIT_S: Final = 10.0
YAML: Final = "application/yaml"  # RFC 9512
LINES_LIMIT_S: Final = 2.0
MOST_LINED_BYTES: Final = 32 * 1024  # takes half a second of CPU time
MOST_YAML_BYTES: Final = 256 * 1024  # takes some seconds of CPU time
# An unterminated text matches too: otherwise each quote in it would start a search to the end.
_TEXT: Final = re.compile(rb'"(?:[^"\\]++|\\(?:.|\Z))*+(?:"|\Z)', re.DOTALL)
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\(?:.|\Z))*+(?:"|\Z)|[\[{\]}]', re.DOTALL)
_OPENING: Final = frozenset({b"[", b"{"})
_CLOSING: Final = frozenset({b"]", b"}"})
_finding = Event()  # set while the lines of a body are found
Handle = Callable[..., Awaitable[object]]  # calls its first argument with the others
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"  # ignored before JSON, as RFC 8259 allows and engines do
HUNG_UP: Final = "the client hung up before the body was complete"


class BufferedBody:
    """The received part of one request's body, counted in ``bodies`` until it is released."""

    def __init__(self, bodies: "BufferedBodies") -> None:
        self._bodies = bodies
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count more received bytes.

        Raises:
            QueueFull: all bodies together exceed their bound.
        """
        bodies = self._bodies
        if bodies.bytes + size > bodies.most_bytes:
            raise QueueFull(f"posted bodies already hold {bodies.bytes} bytes (limits.queue_bytes)", AGAIN_S)
        self._bytes += size
        bodies.bytes += size

    def let_go(self) -> None:
        """Stop counting it."""
        self._bodies.bytes -= self._bytes
        self._bytes = 0


class BufferedBodies:
    """ASGI middleware that gives each request its ``BufferedBody``."""

    def __init__(self, app: ASGIApp, queue_bytes: int) -> None:
        self._app = app
        self.most_bytes = SHARE * queue_bytes
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[HELD] = held = BufferedBody(self)
        try:
            await self._app(scope, receive, send)
        finally:
            held.let_go()


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that we read ourselves, within bounds; ``app.py`` adds its schema."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_document(request: Request, limits: Limits) -> object:
    """Return the JSON document of a request's body.

    Raises:
        BodyTooLarge: more than ``limits.body_bytes``; the rest is not read.
        BodyMalformed: not JSON, or deeper or with more values than the limits allow.
    """
    return await decode_soon(await read_body(request, limits), limits)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return a request's body without a byte order mark.

    Raises:
        BodyTooLarge: more than ``limits.body_bytes``; the rest is not read.
        BodyMalformed: it ended early.
        QueueFull: all bodies together exceed their bound.
    """
    body, is_whole = bytearray(), False
    held: BufferedBody | None = request.scope.get(HELD)
    while not is_whole:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise BodyMalformed(HUNG_UP)
        chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
        if held is not None:
            held.add(len(chunk))
        body += chunk
        if len(body) > limits.body_bytes:
            raise BodyTooLarge(f"the body is larger than limits.body_bytes = {limits.body_bytes}")
    return bytes(body).removeprefix(BYTE_ORDER_MARK)


async def decode_soon(body: bytes, limits: Limits, handle: Handle = anyio.to_thread.run_sync) -> object:
    """Return the JSON document of some bytes; ``handle`` decodes large ones off the event loop.

    Raises:
        BodyMalformed: not JSON, deeper than ``limits.depth``, or more than ``limits.nodes`` values.
    """
    await check_nodes(body, limits)
    if len(body) <= SMALL_BYTES:
        return decode_document(body, limits)
    return await handle(decode_document, body, limits)


async def yaml_as_json(body: bytes, limits: Limits) -> bytes:
    """Return the JSON that is equivalent to some bytes of YAML; it is then handled as any JSON.

    Raises:
        BodyMalformed: not YAML, too large, or with aliases.
        BodyTooLarge: its JSON is larger than ``limits.body_bytes``.
    """
    if len(body) > MOST_YAML_BYTES:
        raise BodyMalformed(f"a YAML body may have at most {MOST_YAML_BYTES} bytes; send it as JSON")
    try:
        written = await offload(_to_json, body, limits.body_bytes, limit_s=COUNT_LIMIT_S, purpose=Purpose.DOCUMENTS)
    except TimeoutError as error:
        raise BodyMalformed(f"the YAML body cannot be read within {COUNT_LIMIT_S:g} s; send it as JSON") from error
    if isinstance(written, ConfigError):
        raise BodyMalformed(str(written))
    if written is None:
        raise BodyTooLarge(f"as JSON the body is larger than limits.body_bytes = {limits.body_bytes}")
    return written


async def with_lines(refusal: InvalidJob, body: bytes) -> InvalidJob:
    """Return a refusal whose faults have their lines in the body, if finding them is quick.

    Lines are found for one body at a time; other refusals meanwhile go without, so that no caller waits for lines.
    """
    if len(body) > MOST_LINED_BYTES or b"\n" not in body or _finding.is_set():  # programs send one line
        return refusal
    _finding.set()
    try:
        lines = await offload(_lines_in, body, limit_s=LINES_LIMIT_S, purpose=Purpose.DOCUMENTS)
    except (TimeoutError, OffloadCrowded):
        return refusal
    finally:
        _finding.clear()
    return InvalidJob([replace(fault, line=lines.get(nearest_path(fault.path, lines))) for fault in refusal.faults])


def _lines_in(body: bytes) -> dict[str, int]:
    try:
        return lines_in(body.decode("utf-8"))
    except UnicodeError:
        return {}


def _to_json(body: bytes, most_bytes: int) -> bytes | ConfigError | None:
    """Return the JSON, None if it is larger, or the error as a value: exceptions do not cross the process boundary."""
    try:
        return yaml_to_json(body.decode("utf-8"), "line", most_bytes)
    except (ConfigError, UnicodeError, OverflowError, RecursionError, ValueError) as error:
        return ConfigError(str(error))


async def check_nodes(body: bytes, limits: Limits) -> None:
    """Check the number of values in a body.

    Raises:
        BodyMalformed: there are more than ``limits.nodes``.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > limits.nodes:  # commas within text count here too
        try:
            count = await offload(count_nodes, body, limit_s=COUNT_LIMIT_S, purpose=Purpose.DOCUMENTS)
        except TimeoutError as error:
            raise BodyMalformed(f"the body's values cannot be counted within {COUNT_LIMIT_S:g} s") from error
        if count > limits.nodes:
            raise BodyMalformed(f"the body holds {count} values, more than limits.nodes = {limits.nodes}")


def count_nodes(body: bytes) -> int:
    """Return the approximate number of values, whether the bytes are JSON or not."""
    return _outside_texts(body, b",[{")


def check_depth(body: bytes, limits: Limits) -> None:
    """Check the depth of a body without decoding it.

    Raises:
        BodyMalformed: it is deeper than ``limits.depth``.
    """
    if body.count(b"[") + body.count(b"{") <= limits.depth:
        return
    depth = 0
    for match in _STRUCTURE.finditer(body):
        sign = match[0]
        if sign in _OPENING:
            depth += 1
            if depth > limits.depth:
                raise BodyMalformed(f"the body is nested more than limits.depth = {limits.depth} levels deep")
        elif sign in _CLOSING:
            depth -= 1


def decode_document(body: bytes, limits: Limits) -> object:
    """Return the JSON document of some bytes.

    Raises:
        BodyMalformed: not JSON, deeper than ``limits.depth``, or with a key twice.
    """
    try:
        document: object = msgspec.json.decode(body)
        if is_deeper_than(document, limits.depth):
            raise BodyMalformed(f"the body is nested more than limits.depth = {limits.depth} levels deep")
        if (keys := count_keys(document)) < body.count(b":") and keys < _outside_texts(body, b":"):
            parse_json(body.decode("utf-8"))  # its error names the key
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BodyMalformed(f"the body is not usable JSON: {error}") from error
    return document


def _outside_texts(body: bytes, signs: bytes) -> int:
    """Count some signs outside of texts, without a copy, which would join millions of pieces."""
    wanted = [bytes([sign]) for sign in signs]
    inside = sum(text[0].count(sign) for text in _TEXT.finditer(body) for sign in wanted)
    return sum(map(body.count, wanted)) - inside


def count_keys(document: object) -> int:
    """Return the number of keys in all mappings of a document."""
    count, waiting = 0, [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            count += len(value)
        waiting += [item for item in _items(value) if isinstance(item, dict | list)]
    return count


def is_deeper_than(document: object, depth: int) -> bool:
    """Whether ``document`` has containers nested more than ``depth`` deep."""
    level: list[object] = [document]
    for _ in range(depth):
        level = [item for value in level for item in _items(value)]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
