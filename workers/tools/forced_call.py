"""What a model is held to that must call a tool, on an engine that does not see to ``tool_choice`` itself. Pure."""

from collections.abc import Sequence

from transport.request import Constraint
from workers.tools.definition import ToolDefinition


def call_constraint(tools: Sequence[ToolDefinition]) -> Constraint:
    """Return the constraint of one call as text, of whichever of ``tools``: what ``Fallback.JSON`` reads."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return Constraint(json_schema=calls[0] if len(calls) == 1 else {"anyOf": calls})
