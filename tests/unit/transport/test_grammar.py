"""Patterns and choices as grammars of llama.cpp."""

import pytest

from transport.dialects.grammar import grammar_of_choices, grammar_of_pattern, without_anchors
from transport.request import Thought


def test_choices_are_an_alternation_of_their_texts() -> None:
    """Byte for byte, with the escapes that GBNF needs."""
    grammar = grammar_of_choices(["yes", 'say "no"\\', "two\nlines"])
    assert grammar == 'root ::= "yes" | "say \\"no\\"\\\\" | "two\\nlines"\n'


def test_thoughts_may_precede_the_answer() -> None:
    """For agents that think aloud first."""
    grammar = grammar_of_choices(["yes", "no"], Thought.OPTIONAL)
    assert grammar.splitlines()[:2] == ['root ::= ("<think>" thought)? answer', 'answer ::= "yes" | "no"']
    assert grammar.endswith('"</think>" [ \\t\\n]*\n')
    assert grammar_of_choices(["yes"], Thought.OPEN).startswith("root ::= thought answer\n")
    assert grammar_of_choices(["yes"], Thought.ENDED) == 'root ::= "</think>" [ \\t\\n]* answer\nanswer ::= "yes"\n'


@pytest.mark.parametrize(
    ("pattern", "body"),
    [
        ("^ab$", '"a" "b"'),
        (r"\Aab\Z", '"a" "b"'),
        (r"\d{4}-\d\d", '([0-9]){4,4} "-" [0-9] [0-9]'),
        ("yes|no", '("yes" | "no")'),
        ("(a|bc)*", '((("a" | "b" "c")))*'),
        ("a+?b?", '("a")+ ("b")?'),
        ("x{2,}", '("x"){2,}'),
        (".", "[^\\n]"),
        (r"[^a-c\n]", "[^a-c\\u000A]"),
        (r"\S\W", "[^\\u0009-\\u000A\\u000D\\u0020] [^0-9A-Z\\u005Fa-z]"),
        (r"[\w.]", "[0-9A-Z\\u005Fa-z\\u002E]"),
        ("(?i)aB1", '[Aa] [Bb] "1"'),
        ("(?i)[b-d]", "[b-dB-D]"),
        ("ä", '"ä"'),
        ("", '""'),
    ],
)
def test_a_grammar_matches_what_the_whole_pattern_matches(pattern: str, body: str) -> None:
    """Validation searches for the pattern anywhere in an answer, so such an answer is valid."""
    grammar = grammar_of_pattern(pattern)
    assert grammar is not None
    assert _joined(grammar) == _joined(f"root ::= {body}\n")


def _joined(grammar: str) -> str:
    """Join letters that follow each other: one literal or several mean the same."""
    return grammar.replace('" "', "").replace("((", "(").replace("((", "(").replace("))", ")").replace("))", ")")


@pytest.mark.parametrize(
    "pattern", ["(?=a)b", r"(a)\1", r"a\b", "a^b", "x{5000}", r"[\D]x[\Da]", "(?-i:a)", r"\p{L}", "(", "(?s)."]
)
def test_a_pattern_beyond_grammars_has_none(pattern: str) -> None:
    """The model is asked for it in words instead."""
    assert grammar_of_pattern(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "inner"),
    [("^a|b$", "^a|b$"), ("^ab$", "ab"), (r"\Aab\Z", "ab"), ("ab", "ab"), (r"a\$", r"a\$"), ("(", "(")],
)
def test_anchors_are_removed_at_the_ends_alone(pattern: str, inner: str) -> None:
    """Engines that match the whole answer need none; an anchor inside means something else."""
    assert without_anchors(pattern) == inner
