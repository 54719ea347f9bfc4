"""Tools described in words: with their parameters, in one line."""

import pytest

from workers.requests.prompts.bios import signature_text


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "t()"),
        ({"type": "object", "properties": {}}, "t()"),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
            "t(a: integer, b?: string)",
        ),
        ({"properties": {"unit": {"enum": ["c", "f"]}}}, 't(unit?: "c" | "f")'),
        ({"properties": {"k": {"const": 1}}, "required": ["k"]}, "t(k: 1)"),
        ({"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, "t(x?: string | null)"),
        ({"properties": {"x": {"type": ["string", "null"]}}}, "t(x?: string | null)"),
        ({"properties": {"xs": {"type": "array", "items": {"type": "number"}}}}, "t(xs?: number[])"),
        ({"properties": {"xs": {"type": "array", "items": {"enum": [1, 2]}}}}, "t(xs?: (1 | 2)[])"),
        ({"properties": {"o": {"type": "object", "properties": {"a": {}}}}}, "t(o?: {a?: any})"),
        ({"properties": {"o": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"type": "boolean"}}}, "t(o?: boolean)"),
        ({"properties": {"o": {"$ref": "#"}}}, "t(o?: {o?: object})"),
        ({"properties": {"o": True}}, "t(o?: any)"),
    ],
)
def test_a_schema_in_one_line(parameters: dict[str, object], text: str) -> None:
    """The line has what a model has to know to call the tool, as briefly as a programmer would write it."""
    assert signature_text("t", parameters) == text
