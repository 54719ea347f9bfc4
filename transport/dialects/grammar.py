"""Grammars in llama.cpp's GBNF, for constraints that its API has no field for. Pure.

Source: llama.cpp, ``grammars/README.md``; Python's ``re`` for how a pattern is read.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

from transport.request import Thought

MAX_REPEATS: Final = 1000  # llama.cpp refuses grammars that unfold to more
LAST_SHORT: Final = 0xFFFF  # last character that four hexadecimal digits express
Parsed = Sequence[tuple[Any, Any]]
Ranges = list[tuple[int, int]]
_CATEGORIES: Final[Mapping[Any, Ranges]] = {
    code.CATEGORY_DIGIT: [(48, 57)],
    code.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
    code.CATEGORY_SPACE: [(9, 10), (13, 13), (32, 32)],
}
_NEGATED: Final = {
    code.CATEGORY_NOT_DIGIT: code.CATEGORY_DIGIT,
    code.CATEGORY_NOT_WORD: code.CATEGORY_WORD,
    code.CATEGORY_NOT_SPACE: code.CATEGORY_SPACE,
}
_END: Final = '"</think>" [ \\t\\n]*'
# A thought may hold any tag but its own end; ``</t`` begins that end, so it stands for it alone.
_THOUGHT: Final = f'thought ::= ([^<] | "<" [^/] | "</" [^t])* {_END}\n'
_ROOTS: Final = {
    Thought.OPTIONAL: ('("<think>" thought)? answer', _THOUGHT),
    Thought.OPEN: ("thought answer", _THOUGHT),
    Thought.ENDED: (f"{_END} answer", ""),
}


class Inexpressible(Exception):
    """A pattern uses what a grammar lacks: lookaround, a back reference, or an anchor within the text."""


def grammar_of_choices(choices: Iterable[str], thought: Thought = Thought.NONE) -> str:
    """Return the grammar of an answer that is one of ``choices``, after its thought."""
    return _grammar(" | ".join(_literal(choice) for choice in choices), thought)


def grammar_of_pattern(pattern: str, thought: Thought = Thought.NONE) -> str | None:
    """Return a grammar for answers that a regular expression matches whole; None if no grammar can express it."""
    try:
        parsed = parser.parse(pattern)
        if parsed.state.flags & re.DOTALL:
            return None
        body = _sequence(_unanchored(list(parsed)), is_folded=bool(parsed.state.flags & re.IGNORECASE))
    except (re.error, Inexpressible, OverflowError, RecursionError):
        return None
    return _grammar(body, thought)


def without_anchors(pattern: str) -> str:
    """Return a regular expression without the anchors at its ends, for engines that match the whole answer."""
    try:
        parsed = list(parser.parse(pattern))
    except (re.error, OverflowError, RecursionError):
        return pattern
    inner = _unanchored(parsed)
    if inner and len(inner) < len(parsed):
        begins, ends = parsed[0][0] is code.AT, parsed[-1][0] is code.AT
        pattern = pattern.removeprefix("^").removeprefix("\\A") if begins else pattern
        pattern = pattern.removesuffix("$").removesuffix("\\Z") if ends else pattern
    return pattern


def _grammar(answer: str, thought: Thought) -> str:
    if thought is Thought.NONE:
        return f"root ::= {answer}\n"
    root, rule = _ROOTS[thought]
    return f"root ::= {root}\nanswer ::= {answer}\n{rule}"


def _unanchored(parsed: Parsed) -> Parsed:
    """Return a pattern without the anchors at its ends, which a whole match implies."""
    if parsed and parsed[0] in ((code.AT, code.AT_BEGINNING), (code.AT, code.AT_BEGINNING_STRING)):
        parsed = parsed[1:]
    if parsed and parsed[-1] in ((code.AT, code.AT_END), (code.AT, code.AT_END_STRING)):
        parsed = parsed[:-1]
    return parsed


def _sequence(parsed: Parsed, *, is_folded: bool) -> str:
    return " ".join(_part(each, value, is_folded=is_folded) for each, value in parsed) or '""'


def _part(each: Any, value: Any, *, is_folded: bool) -> str:  # noqa: ANN401 - the parser's own
    folds = partial(_sequence, is_folded=is_folded)
    match each:
        case code.LITERAL:
            text = _character(value, is_folded=is_folded)
        case code.NOT_LITERAL:
            text = _class([(value, value)], is_negated=True)
        case code.ANY:
            text = "[^\\n]"
        case code.IN:
            text = _set(value, is_folded=is_folded)
        case code.BRANCH:
            text = f"({' | '.join(folds(branch) for branch in value[1])})"
        case code.SUBPATTERN:
            text = _group(value, is_folded=is_folded)
        case code.MAX_REPEAT | code.MIN_REPEAT:
            text = _repeated(value, folds)
        case _:
            raise Inexpressible
    return text


def _group(value: Any, *, is_folded: bool) -> str:  # noqa: ANN401 - the parser's own
    _, added, removed, inner = value
    if removed or added & ~(re.IGNORECASE | re.UNICODE):
        raise Inexpressible
    return f"({_sequence(inner, is_folded=is_folded or bool(added & re.IGNORECASE))})"


def _repeated(value: Any, folds: Callable[[Parsed], str]) -> str:  # noqa: ANN401 - the parser's own
    least, most, inner = value
    item = f"({folds(inner)})"
    if most is code.MAXREPEAT:
        return f"{item}{'*' if least == 0 else '+' if least == 1 else f'{{{_bounded(least)},}}'}"
    if (least, most) == (0, 1):
        return f"{item}?"
    return f"{item}{{{_bounded(least)},{_bounded(most)}}}"


def _bounded(count: int) -> int:
    if count > MAX_REPEATS:
        raise Inexpressible
    return count


def _set(members: Parsed, *, is_folded: bool) -> str:
    ranges: Ranges = []
    is_negated = False
    for each, value in members:
        if each is code.NEGATE:
            is_negated = True
        elif each is code.LITERAL:
            ranges.append((value, value))
        elif each is code.RANGE:
            ranges.append(value)
        elif each is code.CATEGORY and value in _CATEGORIES:
            ranges += _CATEGORIES[value]
        elif each is code.CATEGORY and value in _NEGATED and len(members) == 1:
            return _class(_CATEGORIES[_NEGATED[value]], is_negated=True)
        else:
            raise Inexpressible
    if is_folded:
        ranges += [other for each in ranges for other in _other_case(*each)]
    return _class(ranges, is_negated=is_negated)


def _other_case(first: int, last: int) -> Ranges:
    """Return the ASCII letters of a range in the other case."""
    return [
        (max(first, begin) + shift, min(last, end) + shift)
        for begin, end, shift in ((ord("a"), ord("z"), -32), (ord("A"), ord("Z"), 32))
        if max(first, begin) <= min(last, end)
    ]


def _character(character: int, *, is_folded: bool) -> str:
    ways = {chr(character)}
    if is_folded:
        ways |= {way for way in (chr(character).lower(), chr(character).upper()) if len(way) == 1}
    return _literal(chr(character)) if len(ways) == 1 else _class([(ord(way), ord(way)) for way in sorted(ways)])


def _class(ranges: Ranges, *, is_negated: bool = False) -> str:
    members = (_escaped(first) + (f"-{_escaped(last)}" if last > first else "") for first, last in ranges)
    return f"[{'^' if is_negated else ''}{''.join(members)}]"


def _escaped(character: int) -> str:
    letter = chr(character)
    if letter.isascii() and letter.isalnum():
        return letter
    return f"\\u{character:04X}" if character <= LAST_SHORT else f"\\U{character:08X}"


def _literal(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(letter, letter) for letter in text) + '"'
