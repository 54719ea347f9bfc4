"""Job files: YAML or JSON, whose conversations may be the rows of a JSONL or CSV file beside it.

Source: docs/reference/jobs.md, "Conversations of a file".
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from roundhouse_client.errors import RoundhouseError

KEYS: Final = frozenset({"file", "id", "prompt", "variables", "metadata", "limit"})
MOST_ROWS: Final = 100_000  # most rows without conversations.limit
MOST_CHARS: Final = 16 * 1024 * 1024  # longest line or cell
MOST_FAULTS: Final = 20
NO_NUMBER: Final = "is no number: NaN and Infinity are not JSON"
MOST_SHOWN: Final = 400  # shown characters of a row's names
A_PIECE: Final = 1000  # rows between two reports of progress
DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}
LINES: Final = frozenset({".jsonl", ".ndjson"})
_NAMED: Final = re.compile(r"\$(?:(?P<dollar>\$)|(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[^{}$]+)\})")
Row = Mapping[str, object]
OnProgress = Callable[[int], None]


class JobFileInvalid(RoundhouseError):
    """A job file, or a file that it names, cannot be used; ``faults`` are lines of text, each with its place."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob:
    """A job with its conversations; for those from rows, ``file`` and the line of each."""

    document: dict[str, Any]
    file: Path | None = None
    lines: tuple[int, ...] = ()

    def place_of(self, path: str) -> str | None:
        """Return the file and line of a fault's path that is in a row; None elsewhere."""
        found = re.match(r"conversations\[(\d+)\]", path)
        if self.file is None or found is None or int(found[1]) >= len(self.lines):
            return None
        return f"{self.file}:{self.lines[int(found[1])]}"


def load_job(path: str | Path, *, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """Return the job of a file, with its conversations, ready to be posted; YAML needs PyYAML installed.

    ``on_progress`` is called now and then with the number of rows read.

    Raises:
        JobFileInvalid: it cannot be read or used; it has every fault with its line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileInvalid([f"{path}: {_why(error)}"]) from error
    return with_rows(_decoded(path, text), path.parent, str(path), on_progress).document


def with_rows(document: Mapping[str, Any], folder: Path, source: str, on_progress: OnProgress | None = None) -> ReadJob:
    """Return a job with the conversations of a file that it names, relative to ``folder``.

    Raises:
        JobFileInvalid: it has every fault with its line.
    """
    wanted = document.get("conversations")
    if not isinstance(wanted, Mapping):
        return ReadJob(document=dict(document))
    faults = list(_faults_of(wanted))
    if faults:
        raise JobFileInvalid([f"{source}: conversations{fault}" for fault in faults])
    file = folder / str(wanted["file"])
    found = _Conversations(wanted, file)
    unfilled = _Unfilled(document, wanted)
    try:
        for number, (line, row) in enumerate(_rows(file, found), start=1):
            if number == 1 and (names := list(unfilled.faults(row))):
                raise JobFileInvalid([f"{source}: {fault}" for fault in names])
            found.add(line, row)
            if on_progress is not None and number % A_PIECE == 0:
                on_progress(number)
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileInvalid([f"{source}: conversations.file: {file}: {_why(error)}"]) from error
    if not found.conversations and not found.faults:
        found.faults.append(f"{file}: has no rows")
    if found.faults:
        raise JobFileInvalid(found.faults)
    if on_progress is not None:
        on_progress(len(found.conversations))
    return ReadJob(document={**document, "conversations": found.conversations}, file=file, lines=tuple(found.lines))


class _Conversations:
    """The conversations and the faults of rows, as they are read."""

    def __init__(self, wanted: Mapping[str, Any], file: Path) -> None:
        self._file = file
        self._prompt = str(wanted["prompt"])
        self._id = wanted.get("id")
        self._variables = wanted.get("variables")
        self._metadata = wanted.get("metadata")
        self.limit = wanted.get("limit")
        self.conversations: list[dict[str, Any]] = []
        self.lines: list[int] = []
        self.faults: list[str] = []

    @property
    def names(self) -> list[str]:
        """The fields that every row must have for texts."""
        found = [name for text in (self._id or "", self._prompt) for name in _names(str(text))]
        return list(dict.fromkeys((*found, *(self._variables or ()))))

    @property
    def all_names(self) -> list[str]:
        """All fields that every row must have, with those for metadata."""
        return list(dict.fromkeys((*self.names, *(self._metadata or ()))))

    def refuse(self, line: int, message: str) -> None:
        """Record a fault of a line."""
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(f"{self._file}:{line}: {message}")

    def add(self, line: int, row: Row) -> None:
        """Turn a row into a conversation."""
        faults = self._faults_of_row(row)
        prompt = "" if faults else _filled(self._prompt, row)
        if not faults and not prompt.strip():
            faults = ["the prompt is blank"]
        for fault in faults:
            self.refuse(line, fault)
        if faults:
            return
        variables = None if self._variables is None else {name: row[name] for name in self._variables}
        conversation: dict[str, Any] = {} if self._id is None else {"id": _filled(str(self._id), row)}
        # With variables the service replaces $NAME; dollars from a row must stay as they are.
        conversation["prompt"] = prompt if variables is None else prompt.replace("$", "$$")
        if variables is not None:
            conversation["variables"] = variables
        if self._metadata is not None:
            conversation["metadata"] = {name: row[name] for name in self._metadata}
        self.conversations.append(conversation)
        self.lines.append(line)

    def _faults_of_row(self, row: Row) -> list[str]:
        lacking = [f"{name!r} is not there; the row has {_listed(row)}" for name in self.all_names if name not in row]
        faults = {name: fault for name in self.names if name in row and (fault := _value_fault(row[name]))}
        faults |= {name: NO_NUMBER for name in self._metadata or () if name in row and not _is_json(row[name])}
        return lacking + [f"{name!r} {fault}" for name, fault in faults.items()]


class _Unfilled:
    """Texts of a job outside its conversations that may name fields of rows."""

    def __init__(self, document: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        self._given = set(wanted.get("variables") or ())
        self._texts = {"system": document.get("system"), **_texts_in("until", document.get("until"), "says")}
        agents = document.get("agents")
        for place, agent in enumerate(agents if isinstance(agents, list) else ()):
            if isinstance(agent, Mapping):
                at = f"agents[{place}]"
                self._texts |= {f"{at}.{key}": agent.get(key) for key in ("system", "role", "otherwise")}
                self._texts |= _texts_in(f"{at}.validation", [agent.get("validation")], "choices")

    def faults(self, row: Row) -> Iterator[str]:
        """Yield the texts that name a field of the rows that is not a variable: it would not be replaced."""
        for place, text in self._texts.items():
            for name in dict.fromkeys(_names(text)) if isinstance(text, str) else ():
                if name in row and name not in self._given:
                    yield f"{place}: ${name} is a field of the rows; list it in conversations.variables"


def _texts_in(place: str, entries: object, key: str) -> dict[str, object]:
    lists = [entry.get(key) for entry in (entries if isinstance(entries, list) else ()) if isinstance(entry, Mapping)]
    texts = [text for each in lists if isinstance(each, list) for text in each]
    return {f"{place}.{key}[{number}]": text for number, text in enumerate(texts)}


def _value_fault(value: object) -> str | None:
    """Return the fault of a field that goes into a text."""
    if not isinstance(value, str | int | float):
        return "is no text, number, true or false"
    if isinstance(value, float) and not math.isfinite(value):
        return NO_NUMBER
    if isinstance(value, str) and not _is_text(value):
        return "has half of a letter, of two surrogates"
    return "is empty" if value == "" else None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _faults_of(wanted: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(wanted.keys() - KEYS):
        yield f".{key}: unknown key; known are {', '.join(sorted(KEYS))}"
    for key in ("file", "prompt"):
        if wanted.get(key) is None:
            yield f".{key}: is required"
    for key, (is_right, message) in FORMS.items():
        value = wanted.get(key)
        if value is not None and not is_right(value):
            yield f".{key}: {message}"
    file = wanted.get("file")
    if isinstance(file, str) and Path(file).suffix.lower() not in {*DELIMITERS, *LINES}:
        yield f".file: must end with one of {', '.join(sorted({*DELIMITERS, *LINES}))}"


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


FORMS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "file": (lambda value: isinstance(value, str) and value != "", "must be text"),
    "prompt": (lambda value: isinstance(value, str) and value != "", "must be text"),
    "id": (lambda value: isinstance(value, str), "must be text, for example $id"),
    "variables": (_are_names, "must be a list of names of fields"),
    "metadata": (_are_names, "must be a list of names of fields"),
    "limit": (_is_count, "must be a whole number from 1 on"),
}


def _rows(file: Path, found: _Conversations) -> Iterator[tuple[int, Row]]:
    """Yield the rows, each with its first line; malformed ones are refused."""
    rows = _table_rows(file, found) if file.suffix.lower() in DELIMITERS else _json_rows(file, found)
    if found.limit is not None:
        yield from islice(rows, found.limit)
        return
    for number, (line, row) in enumerate(rows):
        if number == MOST_ROWS:
            found.refuse(line, f"more than {MOST_ROWS} rows; give conversations.limit")
            return
        yield line, row


def _json_rows(file: Path, found: _Conversations) -> Iterator[tuple[int, Row]]:
    with file.open(encoding="utf-8-sig") as lines:
        number = 0
        while text := lines.readline(MOST_CHARS + 1):
            number += 1
            if len(text) > MOST_CHARS:
                found.refuse(number, f"is longer than {MOST_CHARS} characters")
                return
            if not text.strip():
                continue
            try:
                row = json.loads(text, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                found.refuse(number, f"is not JSON: {error}")
                continue
            if not isinstance(row, dict):
                found.refuse(number, "is not an object")
                continue
            yield number, row


def _table_rows(file: Path, found: _Conversations) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(MOST_CHARS)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, delimiter=DELIMITERS[file.suffix.lower()], strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                found.refuse(line, f"is not CSV: {error}")
                return
            if cells is None:
                return
            if not any(cells):
                continue
            if header is None:
                header = cells
                lacking = [name for name in found.all_names if name not in header]
                if lacking or len(set(header)) < len(header):
                    absent = f"{', '.join(map(repr, lacking))} is not there; it has {_listed(header)}"
                    twice = ", ".join(sorted({repr(name) for name in header if header.count(name) > 1}))
                    names = absent if lacking else f"{twice} stands twice"
                    found.refuse(line, f"the first row has the names of the fields, and {names}")
                    return
                continue
            if len(cells) != len(header):
                found.refuse(line, f"has {len(cells)} cells, and the first row {len(header)}")
                continue
            yield line, dict(zip(header, cells, strict=True))


def _listed(names: Iterable[str]) -> str:
    """Return the names as text, cut to one line."""
    text = ", ".join(names)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _names(text: str) -> Iterator[str]:
    for found in _NAMED.finditer(text):
        if not found["dollar"]:
            yield found["plain"] or found["braced"]


def _filled(text: str, row: Row) -> str:
    """Return a text with field names replaced by a row's values, in one pass; ``$$`` is a dollar."""
    return _NAMED.sub(lambda found: "$" if found["dollar"] else _written(row[found["plain"] or found["braced"]]), text)


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _decoded(path: Path, text: str) -> Mapping[str, Any]:
    try:
        if path.suffix.lower() == ".json":
            document = json.loads(text, object_pairs_hook=unique_keys)
        else:
            import yaml  # noqa: PLC0415 - only YAML needs it

            from roundhouse_client.yaml_words import WordsLoader  # noqa: PLC0415

            try:
                document = yaml.load(text, WordsLoader)  # noqa: S506 - a safe loader
            except yaml.YAMLError as error:
                raise JobFileInvalid([f"{path}: is not YAML: {error}"]) from error
    except ImportError as error:
        raise JobFileInvalid([f"{path}: to read YAML, install PyYAML: pip install pyyaml"]) from error
    except (ValueError, RecursionError) as error:
        raise JobFileInvalid([f"{path}: is not JSON: {error}"]) from error
    if not isinstance(document, dict):
        raise JobFileInvalid([f"{path}: a job is an object with agents and conversations"])
    return document


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the JSON object with these pairs of keys and values.

    Raises:
        ValueError: a key appears twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _why(error: OSError | UnicodeDecodeError) -> str:
    return f"is not UTF-8: {error}" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
