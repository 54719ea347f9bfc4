"""The table of agents that ``launch`` knows, and what a row means for one start. Pure."""

import json
import re
import shlex
import string
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Annotated, Final

import msgspec

from service.errors import ConfigError
from service.formats.documents import parse_document

MASK: Final = "***"
NO_KEY: Final = "roundhouse"  # for a service that asks for none: agents refuse to start without
LEAST_ANSWER, MOST_ANSWER = 512, 8192
ANSWER_PART: Final = 8  # of the context, which an answer may take
_QUOTE: Final = re.compile(r"\\.")  # what is escaped ends no text
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}$")]


class AgentRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent's command line; the head of ``agents.yaml`` says what each field means."""

    program: str
    install: str = ""
    reads: int = 0
    context: int = 32_768
    asks: Annotated[str, msgspec.Meta(pattern="^(/.*)?$")] = ""
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: dict[FileName, str] = msgspec.field(default_factory=dict)
    once: dict[FileName, str] = msgspec.field(default_factory=dict)


class AgentTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows by the agents' names; ``unset`` are patterns of variables that no agent gets."""

    unset: tuple[str, ...] = ()
    agents: dict[Name, AgentRow] = msgspec.field(default_factory=dict)

    def with_rows(self, more: "AgentTable") -> "AgentTable":
        """Return a table with further rows, each in place of one of the same name."""
        return AgentTable(unset=(*self.unset, *more.unset), agents={**self.agents, **more.agents})


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The service and the model of one start; ``context`` is in tokens, None where nobody knows it."""

    url: str
    key: str | None
    model: str
    context: int | None
    session: str
    folder: PurePath


class AgentStart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of an agent: ``unset`` are the variables of the person's own that the agent does not get."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    unset: tuple[str, ...]
    files: Mapping[str, str]
    once: Mapping[str, str]


def read_table(text: str, source: str) -> AgentTable:
    """Read a table.

    Raises:
        ConfigError: it is none.
    """
    try:
        document, _ = parse_document(text, source)
        return msgspec.convert(document or {}, AgentTable)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def prepare(
    table: AgentTable, name: str, facts: LaunchFacts, environment: Mapping[str, str], arguments: tuple[str, ...]
) -> AgentStart:
    """Return an agent's start: its program, environment and files; ``environment`` is the person's own.

    Raises:
        ConfigError: there is no such agent, or its row cannot be filled in.
    """
    row = table.agents.get(name)
    if row is None:
        raise ConfigError(f"{name}: no such agent; known are {', '.join(table.agents)}")
    context = facts.context or row.context
    values = {
        "url": facts.url,
        "key": facts.key or NO_KEY,
        "model": facts.model,
        "context": str(context),
        "answer": str(max(LEAST_ANSWER, min(MOST_ANSWER, context // ANSWER_PART))),
        "session": facts.session,
        "folder": str(facts.folder),
    }

    def fill(text: str) -> str:
        try:
            return _filled(text, values)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{name}: {text!r} cannot be filled in: {error}; $$ is a dollar sign") from error

    given = {key: fill(value).strip() for key, value in row.environment.items()}
    patterns = (*table.unset, *row.unset)
    return AgentStart(
        argv=(row.program, *map(fill, row.arguments), *arguments),
        environment=given,
        unset=tuple(sorted(key for key in environment if any(fnmatchcase(key, each) for each in patterns))),
        files={key: fill(value) for key, value in row.files.items()},
        once={key: fill(value) for key, value in row.once.items()},
    )


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with values in it; one within double quotes is written as JSON, TOML and YAML have it there."""
    pieces: list[str] = []
    end, is_quoted = 0, False
    for found in string.Template.pattern.finditer(text):
        before = text[end : found.start()]
        is_quoted ^= _QUOTE.sub("", before).count('"') % 2 == 1
        filled = string.Template(found[0]).substitute(values)
        pieces += [before, _escaped(filled) if is_quoted and found["escaped"] is None else filled]
        end = found.end()
    return "".join([*pieces, text[end:]])


def _escaped(value: str) -> str:
    written = json.dumps(value, ensure_ascii=False)[1:-1]
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in written)


def too_small(agent: str, row: AgentRow, facts: LaunchFacts) -> str | None:
    """Return why a model's context is too small for an agent; None where it is not, or nobody knows."""
    if facts.context is None or facts.context >= row.reads + LEAST_ANSWER:
        return None
    return (
        f"{facts.model} has a context of {facts.context} tokens, and {agent} reads about {row.reads} before your"
        f" first word; set context: {row.context or row.reads + LEAST_ANSWER} at the model, or name another with"
        f" roundhouse launch {agent} --model"
    )


def shown(launch: AgentStart, key: str | None) -> str:
    """Return all of a start as a person reads it, with the key masked."""
    lines = [f"unset {name}" for name in launch.unset]
    lines += [f"{name}={value}" for name, value in launch.environment.items()]
    for files, when in ((launch.files, "written at each start"), (launch.once, "written once")):
        for name, text in files.items():
            lines += [f"# {name}, {when}", *(f"  {line}" for line in text.splitlines())]
    lines.append(shlex.join(launch.argv))
    text = "\n".join(lines)
    for written in (key, _escaped(key)) if key else ():
        text = text.replace(written, MASK)
    return text
