"""The table of agents that ``launch`` knows, and the start that a row describes. Pure."""

import json
import re
import shlex
import string
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec

from service.errors import ConfigError
from service.formats.documents import parse_document

NO_PROXY: Final = ("NO_PROXY", "no_proxy")
MASK: Final = "***"
NO_KEY: Final = "roundhouse"  # for a service without keys: agents refuse to start without one
LEAST_ANSWER, MOST_ANSWER = 512, 8192
ANSWER_PART: Final = 8  # an answer may take 1/8 of the context
_QUOTE: Final = re.compile(r"\\.")  # an escaped quote ends no text
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
    """Rows by agent name; ``unset`` are patterns of variables that no agent gets."""

    unset: tuple[str, ...] = ()
    agents: dict[Name, AgentRow] = msgspec.field(default_factory=dict)

    def with_rows(self, more: "AgentTable") -> "AgentTable":
        """Return the table with more rows, each replacing one of the same name."""
        return AgentTable(unset=(*self.unset, *more.unset), agents={**self.agents, **more.agents})


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The service and the model of one start; ``context`` is in tokens, None where it is not known."""

    url: str
    key: str | None
    model: str
    context: int | None
    session: str
    folder: PurePath


class AgentStart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of an agent: ``unset`` are the user's own variables that the agent does not get."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    unset: tuple[str, ...]
    files: Mapping[str, str]
    once: Mapping[str, str]


def read_table(text: str, source: str) -> AgentTable:
    """Read a table.

    Raises:
        ConfigError: it is not a valid table.
    """
    try:
        document, _ = parse_document(text, source)
        return msgspec.convert(document or {}, AgentTable)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def prepare(
    table: AgentTable, name: str, facts: LaunchFacts, environment: Mapping[str, str], arguments: tuple[str, ...]
) -> AgentStart:
    """Return an agent's start: its program, environment and files; ``environment`` is the user's own.

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
    unset = sorted(key for key in environment if any(fnmatchcase(key, each) for each in patterns))
    kept = {key: value for key, value in environment.items() if key not in unset}
    return AgentStart(
        argv=(row.program, *map(fill, row.arguments), *arguments),
        environment={**given, **past_proxies(facts.url, {**kept, **given})},
        unset=tuple(unset),
        files={key: fill(value) for key, value in row.files.items()},
        once={key: fill(value) for key, value in row.once.items()},
    )


def past_proxies(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make programs reach an address without the environment's proxies.

    Some programs read the upper-case name, others the lower-case one, so each gets the hosts of both.
    """
    host = urlsplit(url).hostname or ""
    wanted = [host, f"[{host}]"] if ":" in host else [host]
    said = [each.strip() for name in NO_PROXY for each in environment.get(name, "").split(",") if each.strip()]
    hosts = dict.fromkeys(["*"] if "*" in said else [*said, *wanted])
    return dict.fromkeys(NO_PROXY, ",".join(hosts))


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its values filled in; within double quotes they are escaped for JSON, TOML and YAML."""
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
    """Return why a model's context is too small for an agent; None where it is not, or is not known."""
    if facts.context is None or facts.context >= row.reads + LEAST_ANSWER:
        return None
    return (
        f"{facts.model} has a context of {facts.context} tokens, and {agent} reads about {row.reads} before your"
        f" first word; set context: {row.context or row.reads + LEAST_ANSWER} at the model, or name another with"
        f" roundhouse launch {agent} --model"
    )


def shown(launch: AgentStart, key: str | None) -> str:
    """Return a whole start as readable text, with the key masked."""
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
