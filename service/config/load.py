"""From a file to a configuration, and what is wrong with it in lines that name the place and the mend."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.config.schema import Config
from service.errors import ConfigError, Fault
from service.faults import faults_of

_VARIABLE: Final = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


class Environment(BaseSettings):
    """What the environment may say of the configuration."""

    model_config = SettingsConfigDict(env_prefix="ROUNDHOUSE_", extra="ignore")

    api_keys: Annotated[str, NoDecode] = Field(default="", description="keys of the HTTP surface, comma separated")


def load_config(path: Path, overrides: Mapping[str, object] | None = None) -> Config:
    """Return the configuration of ``path``; ``overrides`` are keys of ``server`` that the command line gives.

    Raises:
        ConfigError: with every fault, each with its line where that is known.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    document, lines = parse_yaml(text, str(path))
    return build_config(document, overrides or {}, str(path), lines)


def build_config(
    document: object, overrides: Mapping[str, object], source: str, lines: Mapping[tuple[str | int, ...], int]
) -> Config:
    """Return the configuration that ``document`` describes.

    Raises:
        ConfigError: with every fault.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a configuration is a mapping with the key 'models'")
    document = {**document, "server": _server(document.get("server"), overrides)}
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        places = [entry["loc"] for entry in error.errors(include_url=False)]
        faults = faults_of(error, Config)
        told = [f"{source}{_line(lines, place)}: {fault}" for place, fault in zip(places, faults, strict=True)]
        raise ConfigError("\n".join(told)) from error


def parse_yaml(text: str, source: str) -> tuple[object, dict[tuple[str | int, ...], int]]:
    """Return a YAML (or JSON) document with the environment's variables put in, and the line of each of its keys.

    Raises:
        ConfigError: it is no YAML, or names a variable that is not set.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            lines: dict[tuple[str | int, ...], int] = {}
            _note_lines(node, (), lines)
            document = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{place}: not YAML: {getattr(error, 'problem', None) or error}") from error
    faults: list[Fault] = []
    document = _interpolate(document, (), faults)
    if faults:
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults))
    return document, lines


def _server(given: object, overrides: Mapping[str, object]) -> object:
    if given is not None and not isinstance(given, dict):
        return given
    server: dict[str, object] = {
        **(given or {}),
        **{key: value for key, value in overrides.items() if value is not None},
    }
    keys = [key.strip() for key in Environment().api_keys.split(",") if key.strip()]
    if keys:
        server["api_keys"] = keys
    return server


def _interpolate(value: object, path: tuple[str | int, ...], faults: list[Fault]) -> Any:  # noqa: ANN401 - a YAML document
    if isinstance(value, dict):
        return {key: _interpolate(item, (*path, key), faults) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolate(item, (*path, index), faults) for index, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value

    def put(match: re.Match[str]) -> str:
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            where = ".".join(map(str, path))
            text = (
                f"the environment variable {match['name']} is not set; set it, or write ${{{match['name']}:-default}}"
            )
            faults.append(Fault(path=where, message=text))
        return found or ""

    replaced = _VARIABLE.sub(put, value)
    # A value that is nothing but a variable is what YAML makes of the text: a port stays a number.
    return yaml.safe_load(replaced) if _VARIABLE.fullmatch(value) and replaced else replaced


def _note_lines(node: yaml.Node | None, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*path, str(key.value))
            lines[place] = key.start_mark.line + 1
            _note_lines(value, place, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[*path, index] = value.start_mark.line + 1
            _note_lines(value, (*path, index), lines)


def _line(lines: Mapping[tuple[str | int, ...], int], place: tuple[str | int, ...]) -> str:
    for length in range(len(place), 0, -1):
        if place[:length] in lines:
            return f":{lines[place[:length]]}"
    return ""
