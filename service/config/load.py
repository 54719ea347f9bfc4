"""From a file to a configuration, and what is wrong with it in lines that name the place and the mend."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from service.config.schema import Config
from service.errors import ConfigError
from service.formats.documents import Place, line_of, parse_document, read_text
from service.formats.faults import faults_of, path_of

API_KEYS: Final = "ROUNDHOUSE_API_KEYS"  # the keys of the HTTP surface, comma separated
# Keys that are gone, passed over for one minor version: to refuse them would refuse a start, and an upgrade.
REMOVED: Final[Mapping[tuple[str, str], str]] = {
    ("scheduling", "prewarm"): "prompts are not read beforehand any more",
}
_VARIABLE: Final = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
logger = logging.getLogger(__name__)


def load_config(path: Path, overrides: Mapping[str, object] | None = None) -> Config:
    """Return the configuration of ``path``; ``overrides`` are keys of ``server`` that the command line gives.

    Raises:
        ConfigError: with every fault, each with its line.
    """
    document, lines = parse_document(read_text(path), str(path), lambda text: _interpolate(text, str(path)))
    return build_config(document, overrides or {}, str(path), lines)


@contextmanager
def naming_lines(path: Path) -> Iterator[None]:
    """Add the line to faults of a configuration that are found only beside its files."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        _, lines = parse_document(read_text(path), str(path))
        place = max((each for each in lines if text.startswith(path_of(each))), key=len, default=None)
        if place is None:
            raise
        raise ConfigError(f"{path}{line_of(lines, place)}: {text}") from error


def named_variables(path: Path) -> frozenset[str]:
    """Return the variables of the environment that a configuration names, comments included."""
    return frozenset(match["name"] for match in _VARIABLE.finditer(read_text(path)))


def build_config(document: object, overrides: Mapping[str, object], source: str, lines: Mapping[Place, int]) -> Config:
    """Return the configuration that ``document`` describes.

    Raises:
        ConfigError: with every fault.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a configuration is a mapping with the key 'models'")
    document = _without_removed(document, source, lines)
    document = {**document, "server": _server(document.get("server"), overrides)}
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        if "models" not in document and {"agents", "conversations"} & document.keys():
            message = f"{source}: this looks like a job; a configuration has the key 'models' (run JOB --config FILE)"
            raise ConfigError(message) from error
        places = [entry["loc"] for entry in error.errors(include_url=False)]
        faults = faults_of(error, Config)
        messages = [f"{source}{line_of(lines, place)}: {fault}" for place, fault in zip(places, faults, strict=True)]
        raise ConfigError("\n".join(messages)) from error


def _without_removed(document: dict[str, object], source: str, lines: Mapping[Place, int]) -> dict[str, object]:
    for (section, key), why in REMOVED.items():
        given = document.get(section)
        if isinstance(given, dict) and key in given:
            document = {**document, section: {name: value for name, value in given.items() if name != key}}
            logger.warning(
                "%s%s: %s.%s has no effect: %s; remove it", source, line_of(lines, (section, key)), section, key, why
            )
    return document


def _server(given: object, overrides: Mapping[str, object]) -> object:
    if given is not None and not isinstance(given, dict):
        return given
    server: dict[str, object] = {
        **(given or {}),
        **{key: value for key, value in overrides.items() if value is not None},
    }
    keys = [key.strip() for key in os.environ.get(API_KEYS, "").split(",") if key.strip()]
    if keys:
        server["api_keys"] = keys
    return server


def _interpolate(text: str, source: str) -> str:
    def put(match: re.Match[str]) -> str:
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            name = match["name"]
            raise ConfigError(
                f"{source}: the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
            )
        return found

    return _VARIABLE.sub(put, text)
