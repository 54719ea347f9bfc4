"""YAML and JSON files as JSON values, with the line of each key, so that faults can name it.

YAML is read as the client reads it (``roundhouse_client.yaml_words``).
"""

import errno
import hashlib
import json
import math
import os
import re
import select
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import yaml

from roundhouse_client.job_files import unique_keys
from roundhouse_client.yaml_words import WordsLoader, key_fault, kind_fault
from service.errors import ConfigError
from service.formats.faults import path_of

MOST_NODES: Final = 1_000_000
MOST_JSON_CHARS: Final = 64 * 1024  # longest JSON text whose lines are found: it takes a second of CPU time
PIPE_WAIT_MS: Final = 5000
PIPE_BYTES: Final = 64 * 1024 * 1024
Place = tuple[str | int, ...]
Substitute = Callable[[str], str]
READING: Final = {errno.ENOENT: "there is no such file", errno.EISDIR: "is a folder; name a file in it"}
_ODD: Final = re.compile(f"{yaml.reader.Reader.NON_PRINTABLE.pattern}|[\x85\u2028\u2029]")


def digest_of(document: object) -> str:
    """Return the digest of a JSON document, equal for equal content."""
    return hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()


def parse_document(text: str, source: str, substitute: Substitute | None = None) -> tuple[object, dict[Place, int]]:
    """Parse a YAML or JSON text; return its content and the line of each key (none for JSON).

    ``substitute`` is applied to the scalars of a YAML text before their types are resolved, so that an unquoted
    ``${PORT}`` is a number and a quoted one is text.

    Raises:
        ConfigError: the text is neither, or has a value that JSON lacks.
    """
    if text.lstrip()[:1] in ("{", "[") and substitute is None:
        try:
            return parse_json(text), {}
        except ValueError as error:
            if source.endswith(".json"):
                raise ConfigError(f"{source}: not JSON: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{source}: nested too deeply") from error
    with naming_source(source):
        return _parse_yaml(text, source, substitute)


def parse_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, a key appears twice, or a number is not a JSON number.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_finite, parse_float=_finite)


@contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Raise the faults of a YAML text as a ``ConfigError`` with its name, and the line where known."""
    try:
        yield
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    except ValueError as error:  # a number with more digits than Python reads
        raise ConfigError(f"{source}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{place}: not YAML: {_problem(error)}") from error


def _problem(error: yaml.YAMLError) -> str:
    """Describe an error of YAML; the commonest mistakes come with a remedy."""
    problem = str(getattr(error, "problem", None) or error)
    if "'\\t'" in problem:
        return "a tab begins a line; indent with spaces"
    if "but got ':'" in problem or problem == "mapping values are not allowed here":
        return f"{problem}; put a text that holds ': ' in quotes"
    return problem


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a JSON number")
    return value


def line_of(lines: Mapping[Place, int], place: Sequence[str | int]) -> str:
    """Return ``:12`` for the nearest part of ``place`` that has a line, or nothing."""
    for length in range(len(place), 0, -1):
        line = lines.get(tuple(place[:length]))
        if line is not None:
            return f":{line}"
    return ""


def lines_in(text: str) -> dict[str, int]:
    """Return the line of each part of a YAML or JSON text by its path, where it is clear.

    Lines end where editors end them, not at YAML's further line breaks.
    """
    first_lines: dict[str, int] = {}
    doubled = set()
    for place, line in _places_in(text).items():
        path = path_of(place)
        if path in first_lines:
            doubled.add(path)
        first_lines[path] = line
    return {path: line for path, line in first_lines.items() if path not in doubled}


def lines_of_file(text: str, lines: dict[Place, int]) -> dict[Place, int]:
    """Return the lines from ``parse_document``; for JSON, find them if the text is short."""
    return lines or (_places_in(text) if "\n" in text and len(text) <= MOST_JSON_CHARS else {})


def _places_in(text: str) -> dict[Place, int]:
    plain = _ODD.sub(" ", text)
    if plain.lstrip()[:1] in ("{", "["):
        plain = plain.replace("\t", " ")  # JSON allows tabs between its parts
    try:
        return _parse_yaml(plain, "", None)[1]
    except (ConfigError, yaml.YAMLError, RecursionError, ValueError):  # not all JSON is YAML
        return {}


def _parse_yaml(text: str, source: str, substitute: Substitute | None) -> tuple[object, dict[Place, int]]:
    loader = WordsLoader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Place, int] = {}
        if node is None:
            return None, lines
        _check_size(node, source)
        _visit(node, (), lines, source, lambda scalar: _substitute(loader, scalar, substitute))
        return loader.construct_document(node), lines
    finally:
        loader.dispose()


def _check_size(root: yaml.Node, source: str) -> None:
    """Refuse documents that aliases blow up: 512 bytes may stand for more values than fit in memory."""
    left, waiting = MOST_NODES, [root]
    while waiting:
        node = waiting.pop()
        left -= 1
        if left < 0:
            raise ConfigError(
                f"{source}: stands for more than {MOST_NODES} values; are there aliases of aliases in it?"
            )
        if isinstance(node, yaml.MappingNode):
            waiting += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _visit(
    node: yaml.Node, place: Place, lines: dict[Place, int], source: str, change: Callable[[yaml.ScalarNode], None]
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            check_key(key, source)
            inside = (*place, key.value)
            if inside in lines:
                raise ConfigError(f"{source}:{line}: the key {key.value!r} stands in line {lines[inside]} already")
            lines[inside] = line
            _visit(value, inside, lines, source, change)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[*place, index] = value.start_mark.line + 1
            _visit(value, (*place, index), lines, source, change)
    elif isinstance(node, yaml.ScalarNode):
        change(node)
    check_kind(node, source)


def check_key(key: yaml.Node, source: str) -> None:
    """Check that a key of a mapping is text.

    Raises:
        ConfigError: it is not.
    """
    if fault := key_fault(key):
        raise ConfigError(f"{source}:{key.start_mark.line + 1}: {fault}")


def check_kind(node: yaml.Node, source: str) -> None:
    """Check that JSON has a node's kind of value.

    Raises:
        ConfigError: it does not.
    """
    if fault := kind_fault(node):
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: {fault}")


def _substitute(loader: WordsLoader, node: yaml.ScalarNode, substitute: Substitute | None) -> None:
    if substitute is None:
        return
    node.value = substitute(node.value)
    if node.style is None:
        node.tag = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return _read_soon(file, path).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {READING.get(error.errno or 0) or f'cannot be read: {error.strerror}'}") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _read_soon(file: BinaryIO, path: Path) -> bytes:
    """Return the content of a file, or of a pipe, whose writer may be slow but has to be there."""
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file.read()
    content = bytearray()
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while True:
        poll.poll(PIPE_WAIT_MS)
        try:
            piece = os.read(file.fileno(), 65536)
        except BlockingIOError:
            continue
        if not piece:
            break
        content += piece
        if len(content) > PIPE_BYTES:
            raise ConfigError(f"{path}: is not a file, and more than {PIPE_BYTES} bytes come out of it")
    if not content:
        raise ConfigError(f"{path}: is not a file, and nothing writes to it")
    return bytes(content)
