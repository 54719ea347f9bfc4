"""The words that Roundhouse puts around a job's own (specification, "Words around a job"). Pure.

A conversation keeps the words that it began with. They are stored with it as a whole, so an upgrade or another
configuration changes no earlier words.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from string import Template
from typing import Final

import msgspec
from msgspec.structs import replace

from workers.requests.bios_words import BiosPolicy, BiosWords, Clock

DEFAULT_ROLE: Final = "participant"
LONE_CONTEXT: Final = "You are $who."  # only if the agent has a role
SHARED_CONTEXT: Final = "Several agents take part; all words carry their speakers' names."  # only if there are several
# The names that each piece may use; others are refused where the piece is given.
NAMES: Final[Mapping[str, frozenset[str]]] = {
    "template": frozenset({"context", "tools", "budget", "now"}),  # the template of a model's whole BIOS
    "context": frozenset({"agent", "role", "who", "agents"}),
    "cue": frozenset({"agent", "role", "who", "round", "rounds"}),
    "quote": frozenset({"agent", "role", "who", "round", "words"}),
    "invalid": frozenset({"reason"}),
    "left": frozenset({"agent", "role", "who"}),
}


class Phrases(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces that a job's author, or the operator of a model, has given instead of Roundhouse's own."""

    context: str | None = None
    cue: str | None = None
    quote: str | None = None
    invalid: str | None = None
    left: str | None = None


class Wording(msgspec.Struct, frozen=True, kw_only=True):
    """All of Roundhouse's words in the conversations of one model; each is a ``string.Template``.

    ``context`` introduces an agent among others, ``lone_context`` one that is alone and has a role. ``shared_context``
    and ``shared_cue`` are for ``view: shared``. ``cue`` ends each message to an agent, ``silence`` replaces an empty
    one. ``left`` says that an agent has no further turn. ``omitted`` says which rounds are hidden, ``summed`` what was
    said in them, and ``sum_up`` asks for that summary. The demands describe the required form of an answer if no engine
    constrains it.
    """

    bios: BiosWords = msgspec.field(default_factory=BiosWords)
    clock: Clock = Clock.START
    context: str = "You are $who. Several agents take part; others' words carry their names. Answer only as yourself."
    lone_context: str = LONE_CONTEXT
    shared_context: str = SHARED_CONTEXT
    cue: str = ""
    silence: str = "..."
    shared_cue: str = "$who:"
    quote: str = "$agent: $words"
    left: str = "$who has left."
    omitted: str = "(What was said in rounds $first to $last is left out.)"
    summed: str = "(Rounds $first to $last, summed up: $summary)"
    # Chosen among others by what a small model keeps (docs/benchmarks.md, "Summaries").
    sum_up: str = (
        "List the facts and decisions of the conversation above, one on each line, with names and numbers, and what is "
        "still open. At most $words words."
    )
    invalid: str = "Your answer is not valid: $reason. Answer again, with nothing else."
    choices_demand: str = "Answer with exactly one of: $choices."
    pattern_demand: str = "Answer with text that matches the regular expression $pattern and nothing else."
    schema_demand: str = "Answer with JSON that fits this schema and nothing else: $schema"


class ConversationWords(msgspec.Struct, frozen=True, kw_only=True):
    """The time at which a conversation began, with its zone, and its words for each model that has spoken in it."""

    began_at: datetime
    models: Mapping[str, Wording]


def wording_of(policy: BiosPolicy) -> Wording:
    """Return the words of a model: Roundhouse's own, with its operator's pieces."""
    bios = BiosWords(is_on=policy.is_on, template=policy.template, clock_step_s=policy.clock_step_s)
    given = Phrases(
        context=policy.context, cue=policy.cue, quote=policy.quote, invalid=policy.invalid, left=policy.left
    )
    return put(given, Wording(bios=bios, clock=policy.clock))


def put(given: Phrases, wording: Wording) -> Wording:
    """Return ``wording`` with the given pieces instead of its own; given pieces are always said."""
    if given == Phrases():
        return wording
    context = given.context
    return replace(
        wording,
        context=_or(context, wording.context),
        lone_context=_or(context, wording.lone_context),
        shared_context=_or(context, wording.shared_context),
        cue=_or(given.cue, wording.cue),
        shared_cue=_or(given.cue, wording.shared_cue),
        quote=_or(given.quote, wording.quote),
        invalid=_or(given.invalid, wording.invalid),
        left=_or(given.left, wording.left),
    )


def _or(given: str | None, piece: str) -> str:
    return piece if given is None else given


def phrase_fault(name: str, text: str) -> str | None:
    """Return the fault of a phrase's template, or None."""
    template = Template(text)
    if not template.is_valid():
        return "a $ that is no name: write $$ for a dollar"
    strange = sorted(set(template.get_identifiers()) - NAMES[name])
    known = ", ".join(f"${each}" for each in sorted(NAMES[name]))
    return f"${strange[0]} is not one of {known}" if strange else None


def leaves_out(template: str | None, name: str) -> bool:
    """Whether a template of a whole BIOS has no place for ``name``: ``context`` or ``now``."""
    return template is not None and name not in Template(template).get_identifiers()


def quote_fault(text: str | None) -> str | None:
    """Return the fault of the words around what another agent has said, or None."""
    if text is None or "words" in Template(text).get_identifiers():
        return None
    return "has no $words: what others say would be said to nobody"


def encode_models(models: Mapping[str, Wording]) -> str:
    """Return the JSON of the words of models, equal for equal words."""
    return msgspec.json.encode(models, order="deterministic").decode()


@lru_cache(maxsize=64)
def decode_models(text: str) -> Mapping[str, Wording]:
    """Return the words of models from their JSON; thousands of conversations share them."""
    return _decode(text)


def encode_clock(began_at: datetime) -> str:
    """Return a time with its zone's name."""
    return f"{began_at.isoformat()} {began_at.tzname() or ''}"


def decode_clock(text: str) -> datetime:
    """Return the time, in its zone."""
    stamp, _, name = text.partition(" ")
    at = datetime.fromisoformat(stamp)
    return at.replace(tzinfo=timezone(at.utcoffset() or timedelta(), name)) if name else at


_decode: Final = msgspec.json.Decoder(dict[str, Wording]).decode
