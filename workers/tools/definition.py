"""Tools as a model is shown them: OpenAI tool definitions, checked once, before anything runs."""

import difflib
import json
from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec

from workers.errors import InvalidTool
from workers.offload.pool import judge
from workers.tools.call_journal import Unverified
from workers.tools.schemas import schema_fault, schema_trouble

OURS: Final = frozenset({"unverified", "mcp"})  # keys that Roundhouse adds to OpenAI definitions
KEYS: Final = ("type", "function", *sorted(OURS))
FUNCTION_KEYS: Final = ("name", "description", "parameters", "strict")


class ToolOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The MCP server that has a tool, and the server's name for it."""

    server: str
    tool: str


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """One tool; ``document`` is its OpenAI definition as the engine gets it.

    ``unverified`` and ``mcp`` are our additions to such definitions: the treatment of a call with an unknown outcome,
    and the tool's server; None is whichever runner knows its name.
    """

    name: str
    description: str
    parameters: dict[str, object]
    document: Mapping[str, object]
    schema_chars: int = 0  # length of the schema
    unverified: Unverified = Unverified.ASK_MODEL
    origin: ToolOrigin | None = None

    @classmethod
    def parse(cls, document: object) -> Self:
        """Return the tool of an OpenAI definition: ``{type: function, function: {name, description, parameters}}``.

        Raises:
            InvalidTool: it is invalid; the message names the place and the remedy.
        """
        function = document.get("function") if isinstance(document, Mapping) else None
        if not isinstance(document, Mapping) or not isinstance(function, Mapping):
            raise InvalidTool('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
        if document.get("type", "function") != "function":
            raise InvalidTool(f"type: {document['type']!r} is not 'function'")
        _check_keys("", document, KEYS)
        _check_keys("function.", function, FUNCTION_KEYS)
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            raise InvalidTool("function.name: a tool needs a name")
        description = function.get("description") or ""
        if not isinstance(description, str):
            raise InvalidTool("function.description: is not text")
        parameters = _check_schema(function.get("parameters") or {})
        policy = document.get("unverified", Unverified.ASK_MODEL)
        if policy not in tuple(Unverified):
            raise InvalidTool(f"unverified: {policy!r} is not one of {', '.join(Unverified)}")
        return cls(
            name=name,
            description=description,
            parameters=parameters,
            schema_chars=len(json.dumps(parameters)),
            document={"type": "function", **{key: value for key, value in document.items() if key not in OURS}},
            unverified=Unverified(policy),
            origin=_origin(document.get("mcp")),
        )

    def of_text(self, text: str) -> dict[str, Any] | None:
        """Return the arguments that a bare text stands for, if the tool's only parameter is a string; else None.

        None for text that begins like a JSON object or list: that is JSON cut off or malformed. Source: specification,
        "Fallback calls" (``<tool_request name="get_role">Bodyguard</tool_request>``).
        """
        if text.lstrip().startswith(("{", "[")):
            return None
        properties = self.parameters.get("properties")
        if not isinstance(properties, dict) or len(properties) != 1:
            return None
        ((name, schema),) = properties.items()
        if not isinstance(schema, dict) or schema.get("type") != "string":
            return None
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        return {name: value if isinstance(value, str) else text.strip()}

    async def faults_of(self, arguments: dict[str, Any]) -> str | None:
        """Return the schema's fault with ``arguments``, or None."""
        try:
            return await judge(schema_fault, self.parameters, arguments, size=self.schema_chars)
        except TimeoutError:
            return "the check against the schema took too long"


def _check_keys(place: str, document: Mapping[object, object], known: tuple[str, ...]) -> None:
    for key in document:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InvalidTool(f"{place}{key}: unknown key; {hint}")


def _origin(given: object) -> ToolOrigin | None:
    if given is None:
        return None
    server, tool = (given.get("server"), given.get("tool")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(server, str) or not isinstance(tool, str):
        raise InvalidTool('mcp: {"server": ..., "tool": ...} in a definition, or {"mcp": SERVER} in its place')
    return ToolOrigin(server=server, tool=tool)


def _check_schema(parameters: object) -> dict[str, object]:
    trouble = schema_trouble(parameters)
    if trouble is not None or not isinstance(parameters, dict):
        raise InvalidTool(f"function.parameters: {trouble}")
    return parameters


def check_names(tools: tuple[ToolDefinition, ...], exit_tools: tuple[ToolDefinition, ...]) -> None:
    """Check that every name is used once.

    Raises:
        InvalidTool: a call could mean two tools.
    """
    seen: set[str] = set()
    for tool in (*tools, *exit_tools):
        if tool.name in seen:
            raise InvalidTool(f"two tools are named {tool.name!r}")
        seen.add(tool.name)
