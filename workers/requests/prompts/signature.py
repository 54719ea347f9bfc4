"""A tool's parameters in one line, as a programmer would write them: ``add(a: integer, b?: integer)``. Pure."""

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from workers.tools.definition import ToolDefinition

MAX_DEPTH: Final = 3  # of objects within objects; what lies deeper is an object
UNIONS: Final = ("anyOf", "oneOf")


def signature_of(tool: "ToolDefinition") -> str:
    """Return a tool's name with its parameters; one that need not be given has a question mark."""
    return signature_text(tool.name, tool.parameters)


def signature_text(name: str, parameters: dict[str, object]) -> str:
    """Return the same of a name and a JSON schema."""
    return f"{name}({_fields(parameters, parameters, 0)})"


def _fields(schema: dict[str, object], root: dict[str, object], depth: int) -> str:
    properties = schema.get("properties")
    required = schema.get("required")
    wanted = required if isinstance(required, list) else []
    fields = properties.items() if isinstance(properties, dict) else ()
    return ", ".join(f"{name}{'' if name in wanted else '?'}: {_type(each, root, depth)}" for name, each in fields)


def _type(schema: object, root: dict[str, object], depth: int) -> str:
    if not isinstance(schema, dict):
        return "any"
    target = schema.get("$ref")
    if isinstance(target, str):
        return _type(_referred(target, root), root, depth + 1) if depth < MAX_DEPTH else "object"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    ways = next((schema[union] for union in UNIONS if isinstance(schema.get(union), list)), None)
    if isinstance(values, list):
        text = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    elif ways is not None:
        text = " | ".join(dict.fromkeys(_type(way, root, depth) for way in ways))
    else:
        text = _plain_type(schema, root, depth)
    return text


def _plain_type(schema: dict[str, object], root: dict[str, object], depth: int) -> str:
    kind = schema.get("type")
    if kind == "array":
        inner = _type(schema.get("items"), root, depth)
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    if kind == "object" or "properties" in schema:
        fields = _fields(schema, root, depth + 1) if depth < MAX_DEPTH else ""
        return f"{{{fields}}}" if fields else "object"
    return " | ".join(map(str, kind)) if isinstance(kind, list) else str(kind or "any")


def _referred(target: str, root: dict[str, object]) -> object:
    place: object = root
    for step in target.removeprefix("#").split("/")[1:]:
        place = place.get(step) if isinstance(place, dict) else None
    return place
