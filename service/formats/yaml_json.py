"""Conversion of YAML to JSON, value by value, for bodies that strangers post and that may be large.

For a text of only brackets and commas, YAML nodes take 400 times its size; its JSON takes twice its size.
"""

from contextlib import suppress
from typing import Final, cast

import msgspec
import yaml

from roundhouse_client.yaml_words import WordsLoader
from service.errors import ConfigError
from service.formats.documents import check_key, check_kind, naming_source, parse_json

MOST_DEPTH: Final = 200
_SEQUENCE: Final = "tag:yaml.org,2002:seq"
_MAPPING: Final = "tag:yaml.org,2002:map"


def yaml_to_json(text: str, source: str, most_bytes: int) -> bytes | None:
    """Return the JSON of a YAML or JSON text without aliases; None if it is larger.

    Raises:
        ConfigError: the text is neither, or has a value that JSON lacks.
    """
    if text.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            written = msgspec.json.encode(parse_json(text))
            return written if len(written) <= most_bytes else None
    with naming_source(source):
        loader = WordsLoader(text)
        try:
            return _JsonWriter(loader, source, most_bytes).write()
        finally:
            loader.dispose()


class _JsonWriter:
    """Writes the events of one document."""

    def __init__(self, loader: WordsLoader, source: str, most_bytes: int) -> None:
        self._loader = loader
        self._source = source
        self._most_bytes = most_bytes
        self._written = bytearray()
        self._open: list[set[str] | None] = []  # open containers: the keys of a mapping, None for a sequence
        self._wants_key = False

    def write(self) -> bytes | None:
        """Return the JSON; None if it exceeds its bound."""
        self._next()  # the stream begins
        if isinstance(self._next(), yaml.StreamEndEvent):
            return b"null"
        while not isinstance(event := self._next(), yaml.DocumentEndEvent):
            self._take(event)
            if len(self._written) > self._most_bytes:
                return None
        event = self._next()
        if not isinstance(event, yaml.StreamEndEvent):
            problem = "expected a single document in the stream, but found another document"
            raise yaml.composer.ComposerError(None, None, problem, _mark(event))
        return bytes(self._written)

    def _next(self) -> yaml.Event:
        event = cast("yaml.Event", self._loader.get_event())  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            problem = "aliases and anchors are for files; write the values out"
            raise yaml.composer.ComposerError(None, None, problem, _mark(event))
        return event

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.CollectionEndEvent):
            self._written += b"]" if self._open.pop() is None else b"}"
            self._end_value()
            return
        if self._written and self._written[-1] not in b"[{:":
            self._written += b","
        node = self._node_of(event)
        if self._wants_key:
            self._write_key(node)
            return
        check_kind(node, self._source)
        if isinstance(node, yaml.ScalarNode):
            self._written += msgspec.json.encode(WordsLoader.yaml_constructors[node.tag](self._loader, node))
            self._end_value()
            return
        if len(self._open) >= MOST_DEPTH:
            raise RecursionError
        self._wants_key = isinstance(node, yaml.MappingNode)
        self._written += b"{" if self._wants_key else b"["
        self._open.append(set() if self._wants_key else None)

    def _write_key(self, node: yaml.Node) -> None:
        check_key(node, self._source)
        keys = self._open[-1]
        assert keys is not None  # noqa: S101 - a sequence never wants a key
        if node.value in keys:
            line = node.start_mark.line + 1
            raise ConfigError(f"{self._source}:{line}: the key {node.value!r} stands there twice")
        keys.add(node.value)
        self._written += msgspec.json.encode(node.value) + b":"
        self._wants_key = False

    def _end_value(self) -> None:
        self._wants_key = bool(self._open) and self._open[-1] is not None

    def _node_of(self, event: yaml.Event) -> yaml.Node:
        """Return the node that begins with an event, without its content."""
        marks = _mark(event), cast("yaml.error.Mark", event.end_mark)
        given = getattr(event, "tag", None)
        tag = None if given == "!" else cast("str | None", given)
        if isinstance(event, yaml.ScalarEvent):
            resolved = tag or self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
            return yaml.ScalarNode(resolved, event.value, *marks)
        if isinstance(event, yaml.MappingStartEvent):
            return yaml.MappingNode(tag or _MAPPING, [], *marks)
        return yaml.SequenceNode(tag or _SEQUENCE, [], *marks)


def _mark(event: yaml.Event) -> yaml.error.Mark:
    return cast("yaml.error.Mark", event.start_mark)
