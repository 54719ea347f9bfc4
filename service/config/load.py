"""Reading of a configuration file; each fault is a line that names its place and its remedy."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from service.config.model import LAST_PORT
from service.config.schema import Config
from service.errors import ConfigError
from service.formats.documents import Place, line_of, parse_document, read_text
from service.formats.faults import faults_of, path_of

API_KEYS: Final = "ROUNDHOUSE_API_KEYS"  # keys of the HTTP API, comma separated
STORE_URL: Final = "ROUNDHOUSE_STORE_URL"  # overrides store.url
PORT_OFFSET: Final = "port_offset"  # an override: added to every port that this machine listens on
URL: Final = "store_url"  # an override: in place of store.url
_VARIABLE: Final = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
logger = logging.getLogger(__name__)


def load_config(path: Path, overrides: Mapping[str, object] | None = None) -> Config:
    """Return the configuration of ``path``; ``overrides`` are what the command line gives: keys of ``server``.

    ``port_offset`` among them is added to all ports, ``store_url`` replaces ``store.url``.

    Raises:
        ConfigError: with every fault, each with its line.
    """
    document, lines = parse_document(read_text(path), str(path), lambda text: _interpolate(text, str(path)))
    return build_config(document, overrides or {}, str(path), lines)


@contextmanager
def naming_lines(path: Path) -> Iterator[None]:
    """Add the line to faults that are found only once the configuration's files are looked at."""
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
        raise ConfigError(f"{source}: a configuration must be a mapping with the key 'models'")
    settings = {key: value for key, value in overrides.items() if key not in {PORT_OFFSET, URL}}
    document = {**document, "server": _server(document.get("server"), settings)}
    store_url, store = overrides.get(URL), document.get("store")
    if store_url and (store is None or isinstance(store, dict)):
        document["store"] = {**(store or {}), "url": store_url}
    try:
        config = Config.model_validate(document)
        offset = overrides.get(PORT_OFFSET)
        return with_port_offset(config, offset) if isinstance(offset, int) and offset else config
    except ValidationError as error:
        if "models" not in document and {"agents", "conversations"} & document.keys():
            message = f"{source}: this looks like a job; a configuration has the key 'models' (run JOB --config FILE)"
            raise ConfigError(message) from error
        places = [entry["loc"] for entry in error.errors(include_url=False)]
        faults = faults_of(error, Config)
        messages = [f"{source}{line_of(lines, place)}: {fault}" for place, fault in zip(places, faults, strict=True)]
        raise ConfigError("\n".join(messages)) from error


def with_port_offset(config: Config, offset: int) -> Config:
    """Return a configuration whose ports on this machine are all higher by ``offset``.

    Raises:
        ConfigError: a port would be too high.
    """
    models = {
        name: model if model.is_portless else model.model_copy(update={"port": model.port + offset})
        for name, model in config.models.items()
    }
    first, last = (port + offset for port in config.gpus.ports)
    server = config.server.model_copy(update={"port": config.server.port + offset})
    last_ports = [
        model.port + model.replicas + model.most_spares - 1 for model in models.values() if not model.is_portless
    ]
    if max(server.port, *(last_ports or [0])) > LAST_PORT:
        raise ConfigError(f"with --port-offset {offset} the ports of this configuration exceed {LAST_PORT}")
    return config.model_copy(
        update={"server": server, "models": models, "gpus": replace(config.gpus, ports=(first, last))}
    )


def _server(given: object, overrides: Mapping[str, object]) -> object:
    if given is not None and not isinstance(given, dict):
        return given
    server: dict[str, object] = {
        **(given or {}),
        **{key: value for key, value in overrides.items() if value is not None},
    }
    given_keys = os.environ.get(API_KEYS)
    if given_keys is not None:
        server["api_keys"] = keys = [key.strip() for key in given_keys.split(",") if key.strip()]
        if not keys:  # a missing secret must not open the service to all
            raise ConfigError(f"{API_KEYS} is set but holds no key: give it one, or unset it")
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
