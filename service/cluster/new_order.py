"""The order for a cluster, from the options of ``cluster up`` and its configuration."""

import os
import secrets
import sys
from pathlib import Path
from typing import Final

from service.cluster.machine import OFFSET
from service.cluster.order import ClusterHost, ClusterOrder, digest_of_text, folder_of
from service.cluster.own_database import MISSING, OwnDatabase, is_installed
from service.config.load import API_KEYS, STORE_URL, load_config, named_variables, with_port_offset
from service.config.schema import Config
from service.config.source import callers_of_config
from service.errors import ConfigError
from service.formats.documents import parse_document, read_text
from service.node.database_choice import LOCAL

LOOPBACK: Final = "127.0.0.1"
PROGRAM: Final = "ROUNDHOUSE_PROGRAM"  # the command of machines that have it elsewhere
SCALES: Final = (ClusterHost.RAY, ClusterHost.KUBERNETES)


def new_order(
    config: Path, on: ClusterHost, nodes: int, most: int, address: str | None, options: tuple[str, ...]
) -> ClusterOrder:
    """Return the order of a cluster.

    Raises:
        ConfigError: the options do not fit each other, or the configuration cannot be that of a cluster.
    """
    _check_options(on, nodes, most, address, options)
    given, has_database = _given(config), False
    if STORE_URL not in given and not _has_store(config):
        if on is not ClusterHost.HERE or not is_installed():
            raise ConfigError(f"{config}: {MISSING}")
        given[STORE_URL], has_database = OwnDatabase(folder_of(config)).url, True
    host = LOOPBACK if on is ClusterHost.HERE else "0.0.0.0"  # noqa: S104 - other nodes must reach it
    loaded = load_config(config, {"host": host, "store_url": given.get(STORE_URL)})
    callers_of_config(loaded, config.parent)
    if on is ClusterHost.HERE:
        with_port_offset(loaded, (nodes - 1) * OFFSET)  # the last node has the highest
        _check_ports(loaded, nodes)
    if on is ClusterHost.KUBERNETES:
        _check_keys(loaded, given)
    if loaded.store.url in LOCAL:
        raise ConfigError(f"{config}: store.url {loaded.store.url} is of one node; {MISSING}")
    given[STORE_URL] = loaded.store.url
    if most > nodes and on is ClusterHost.RAY and not loaded.server.api_keys:
        raise ConfigError(f"--max: nodes are asked how long turns wait, with a key of {API_KEYS} or server.api_keys")
    return ClusterOrder(
        on=on,
        mark=secrets.token_hex(4),
        config=str(config.resolve()),
        digest=digest_of_text(config),
        nodes=nodes,
        most=most,
        command=_command(),
        host=host,
        port=loaded.server.port,
        state_dir=_state_dir(config, loaded.server.state_dir),
        drain_s=loaded.server.drain_s,
        environment=given,
        address=address,
        options=options,
        has_database=has_database,
    )


def _check_options(on: ClusterHost, nodes: int, most: int, address: str | None, options: tuple[str, ...]) -> None:
    if most < nodes:
        raise ConfigError(f"--max {most} is less than --nodes {nodes}")
    if most > nodes and on not in SCALES:
        raise ConfigError(f"--max: --on {on} cannot add nodes; {' and '.join(SCALES)} can")
    if address and on in {ClusterHost.HERE, ClusterHost.SLURM}:
        raise ConfigError(f"--address: --on {on} needs none")
    if options and on is ClusterHost.HERE:
        raise ConfigError(f"{options[0]}: --on here takes no further options")
    machines = [each for each in (address or "").split(",") if each.strip()]
    if on is ClusterHost.SSH and len(machines) < nodes:
        raise ConfigError(f"--address names {len(machines)} machines, but --nodes {nodes}; name them A,B,C")


def _given(config: Path) -> dict[str, str]:
    """Return the variables that nodes need, with their values here."""
    named = {*named_variables(config), API_KEYS, STORE_URL}
    given = {name: os.environ[name] for name in sorted(named) if name in os.environ}
    return {name: value for name, value in given.items() if value or name not in {API_KEYS, STORE_URL}}


def _check_ports(config: Config, nodes: int) -> None:
    """Check that no node of a machine has a port of another.

    Raises:
        ConfigError: some have.
    """
    engines = [model for model in config.models.values() if not model.is_portless]
    ports = {config.server.port} | {
        model.port + index for model in engines for index in range(model.replicas + model.most_spares)
    }
    for port in sorted(ports):
        for number in range(1, nodes):
            if port + number * OFFSET in ports:
                raise ConfigError(
                    f"node {number} would need port {port + number * OFFSET}, which another has: the nodes of a machine"
                    f" have ports that are {OFFSET} apart"
                )


def _check_keys(config: Config, given: dict[str, str]) -> None:
    """Take the keys of the configuration for Kubernetes' Secret.

    Raises:
        ConfigError: they are in a file of this machine, or there are none.
    """
    if API_KEYS not in given:
        if not config.server.api_keys:
            raise ConfigError(f"Kubernetes' probes need a key: set {API_KEYS}, or server.api_keys")
        given[API_KEYS] = ",".join(config.server.api_keys)
    if config.server.keys_file is not None:
        raise ConfigError("server.keys_file is a file of this machine; put its keys into server.keys")


def _has_store(config: Path) -> bool:
    document, _ = parse_document(read_text(config), str(config))
    store = document.get("store") if isinstance(document, dict) else None
    return isinstance(store, dict) and "url" in store


def _state_dir(config: Path, state_dir: Path) -> str:
    """Return the folder of states; a home is each machine's own."""
    return str(state_dir if str(state_dir).startswith("~") else config.resolve().parent / state_dir)


def _command() -> tuple[str, ...]:
    program = os.environ.get(PROGRAM)
    return (program,) if program else (sys.executable, "-P", "-m", "service.cli.main")
