"""Tools as a model is shown them: OpenAI tool definitions, checked once, before anything runs."""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import jsonschema
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from workers.errors import InvalidTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """One tool; ``document`` is its OpenAI definition as it was given, and goes to the engine so."""

    name: str
    description: str
    parameters: dict[str, object]
    document: Mapping[str, object]

    @classmethod
    def parse(cls, document: object) -> Self:
        """Return the tool of an OpenAI definition: ``{type: function, function: {name, description, parameters}}``.

        Raises:
            InvalidTool: it is none; the message names the place and the mend.
        """
        function = document.get("function") if isinstance(document, Mapping) else None
        if not isinstance(document, Mapping) or not isinstance(function, Mapping):
            raise InvalidTool('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
        if document.get("type", "function") != "function":
            raise InvalidTool(f"type: {document['type']!r} is not 'function'")
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            raise InvalidTool("function.name: a tool needs a name")
        description = function.get("description") or ""
        if not isinstance(description, str):
            raise InvalidTool("function.description: is not text")
        parameters = _check_schema(function.get("parameters") or {})
        return cls(name=name, description=description, parameters=parameters, document=document)

    def faults_of(self, arguments: dict[str, Any]) -> str | None:
        """Return what the schema finds wrong with ``arguments``, None where nothing is."""
        try:
            error = jsonschema.exceptions.best_match(_validator(self.parameters).iter_errors(arguments))
        except Unresolvable as unresolvable:
            return f"the tool's schema refers to {unresolvable}"
        except Exception as trouble:  # noqa: BLE001 - a schema may refer to itself without end, or divide by nothing
            return f"the tool's schema cannot be applied: {type(trouble).__name__}: {trouble}"
        return None if error is None else f"{error.json_path}: {error.message}"


def _validator(schema: dict[str, object]) -> Validator:
    # An empty registry: a schema comes with a job, and must not make us fetch what it refers to.
    known = validator_for(schema, default=jsonschema.Draft202012Validator)
    return _without_patterns(known)(schema, registry=Registry())


@functools.cache
def _without_patterns(known: type[Validator]) -> type[Validator]:
    """Return the validator of a dialect that leaves regular expressions to the tool.

    A job's schema and a model's string can be chosen such that matching takes hours, which would hold the event loop.
    """

    def additional(
        validator: Validator, allowed: object, instance: object, schema: Mapping[str, Any]
    ) -> Iterator[jsonschema.ValidationError]:
        if "patternProperties" not in schema:
            yield from known.VALIDATORS["additionalProperties"](validator, allowed, instance, schema)

    patterned = ("pattern", "patternProperties", "unevaluatedProperties")
    checks = {**dict.fromkeys(patterned, lambda *_: ()), "additionalProperties": additional}
    return cast("type[Validator]", extend(known, checks))  # type: ignore[no-untyped-call]


def _check_schema(parameters: object) -> dict[str, object]:
    if not isinstance(parameters, dict):
        raise InvalidTool("function.parameters: is not a JSON schema")
    try:
        json.dumps(parameters)
        validator_for(parameters, default=jsonschema.Draft202012Validator).check_schema(parameters)
    except (TypeError, ValueError) as error:
        raise InvalidTool(f"function.parameters: is no JSON: {error}") from error
    except jsonschema.SchemaError as error:
        raise InvalidTool(f"function.parameters: {error.message}") from error
    return parameters


def check_names(tools: tuple[ToolDefinition, ...], exit_tools: tuple[ToolDefinition, ...]) -> None:
    """Return if every name is given once.

    Raises:
        InvalidTool: a call could mean two tools.
    """
    seen: set[str] = set()
    for tool in (*tools, *exit_tools):
        if tool.name in seen:
            raise InvalidTool(f"two tools are named {tool.name!r}")
        seen.add(tool.name)
