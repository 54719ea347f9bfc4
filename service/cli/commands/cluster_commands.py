"""``cluster``: nodes on several machines, started, shown and ended by one command."""

import os
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import anyio
import msgspec
import typer
from rich.table import Table

from service.cli.connection import JsonOption, print_document
from service.cli.conventions import FILE
from service.cli.displays.console import plain
from service.cluster.failure import ClusterFailed
from service.cluster.machine import become_node, nodes_here, start_nodes, stop_nodes
from service.cluster.order import (
    FILE as ORDER,
)
from service.cluster.order import (
    ClusterHost,
    ClusterOrder,
    digest_of_text,
    folder_of,
    make_folder,
    needed_order,
    read_order,
    write_order,
)
from service.cluster.own_database import MISSING, OwnDatabase, is_installed
from service.cluster.place import ClusterPlace
from service.config.load import API_KEYS, STORE_URL, load_config, named_variables
from service.errors import ConfigError, StoreUnavailable
from service.formats.documents import parse_document, read_text
from service.node.database_choice import LOCAL
from service.store.seats import Seat, read_seats

LOOK_S: Final = 0.25
START_S: Final = 180.0  # until all nodes are on the database
FRESH_S: Final = 3.0  # a node that the database has not seen for longer is not counted
PLACES: Final[Mapping[ClusterHost, str]] = {
    ClusterHost.HERE: "service.cluster.shells:HerePlace",
    ClusterHost.SSH: "service.cluster.shells:SshPlace",
    ClusterHost.SLURM: "service.cluster.slurm:SlurmPlace",
    ClusterHost.RAY: "service.cluster.ray_place:RayPlace",
    ClusterHost.KUBERNETES: "service.cluster.kubernetes:KubernetesPlace",
}
LOOPBACK_HOST: Final = "127.0.0.1"
PROGRAM: Final = "ROUNDHOUSE_PROGRAM"  # the command of machines that have it elsewhere
SCALES: Final = (ClusterHost.RAY, ClusterHost.KUBERNETES)
MOST_NODES: Final = 256
cluster = typer.Typer(
    help="Nodes on several machines: start, show and end them.", no_args_is_help=True, add_completion=False
)
ConfigHereOption = Annotated[
    Path,
    typer.Option("--config", "-c", envvar="ROUNDHOUSE_CONFIG", help="The configuration, at this path on all machines."),
]
HomeOption = Annotated[Path, typer.Option("--home", help="The folder with the cluster's order.")]


@cluster.command()
def up(
    on: Annotated[ClusterHost, typer.Option("--on", help="What places the nodes.")],
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=MOST_NODES, help="The number of nodes.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="For ssh, sbatch or helm; what a node of Ray takes."),
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max", help="Add nodes up to this number while turns wait (Ray, Kubernetes).")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray's address; ssh's machines A,B,C; kubectl's context.")
    ] = None,
    config: ConfigHereOption = Path(FILE),
) -> None:
    """Start a cluster's nodes, or those that do not run, and wait until all of them are on its database."""
    folder = folder_of(config)
    before = read_order(folder)
    if before is not None and before.on is not on:
        raise _is_up(before, folder)
    order = _order(config, on, nodes, most or nodes, address, tuple(options or ()))
    if before is not None:
        _check_same(before, order, folder)
        order = msgspec.structs.replace(order, job=before.job, has_database=before.has_database or order.has_database)
    make_folder(folder)
    if order.has_database:
        OwnDatabase(folder).start()
    if on is not ClusterHost.KUBERNETES:
        anyio.run(read_seats, order.store_url)  # nodes would wait for a database that is not there
    write_order(folder, order)
    order = _place(folder, order).start()
    write_order(folder, order)
    if on is ClusterHost.KUBERNETES:
        typer.echo("installed; roundhouse cluster status shows its pods")
        return
    for seat in _wait_for_seats(folder, order):
        typer.echo(f"http://{seat.address}:{seat.port}")


@cluster.command()
def status(config: ConfigHereOption = Path(FILE), *, as_json: JsonOption = False) -> None:
    """Show what runs where: by the scheduler's word, and by the database's."""
    folder = folder_of(config)
    order = needed_order(folder)
    try:
        placed = dict(_place(folder, order).describe())
    except ClusterFailed as error:
        placed = {order.on.value: str(error)}
    seats, fault = list[Seat](), ""
    if order.on is not ClusterHost.KUBERNETES:  # its database need not be reachable from here
        try:
            seats = _newest(anyio.run(read_seats, order.store_url))
        except StoreUnavailable as error:
            fault = str(error)
    document = {
        "on": order.on.value,
        "wanted": order.nodes,
        "placed": placed,
        "nodes": msgspec.to_builtins(seats),
        "fault": fault or None,
    }
    table = Table(box=None, show_header=False)
    for where, state in placed.items():
        table.add_row(plain(where), plain(state))
    for seat in seats:
        served = ", ".join(map(plain, seat.models)) or "nothing"
        is_there = seat.seen_s <= FRESH_S
        state = f"serves {served}" if is_there else f"has not been seen for {seat.seen_s:.0f} s"
        table.add_row(f"http://{seat.address}:{seat.port}", state)
    if fault:
        table.add_row("database", plain(fault))
    print_document(document, table, as_json=as_json)


@cluster.command()
def down(config: ConfigHereOption = Path(FILE)) -> None:
    """Drain all nodes of a cluster and end them. Jobs stay in the database."""
    folder = folder_of(config)
    order = needed_order(folder)
    for where, how in _place(folder, order).stop().items():
        typer.echo(f"{plain(where)}: {plain(how)}")
    if order.has_database:
        OwnDatabase(folder).stop()
        typer.echo("its database: stopped; its files stay")
    (folder / ORDER).unlink(missing_ok=True)


@cluster.command(hidden=True)
def node(home: HomeOption, address: Annotated[str | None, typer.Option("--address")] = None) -> None:
    """Become a node of the cluster on this machine."""
    become_node(home, address)


@cluster.command(hidden=True)
def machine(
    act: Annotated[str, typer.Argument()],
    home: HomeOption,
    count: Annotated[int, typer.Option("--count")] = 1,
    address: Annotated[str | None, typer.Option("--address")] = None,
) -> None:
    """Start, look at or stop the cluster's nodes on this machine."""
    order = needed_order(home)
    if act == "start":
        make_folder(home)
        start_nodes(home, order, count, address)
    if act == "stop":
        ended = stop_nodes(home, order)
        typer.echo(", ".join(ended.values()) or "was not running")
    if act == "look":
        typer.echo(f"{len(nodes_here(home, order))} run")


@cluster.command(hidden=True)
def scale(home: HomeOption) -> None:
    """Add nodes under Ray while turns wait, and drain them when there is nothing to do."""
    from service.cluster.scaler import keep_scaling  # noqa: PLC0415 - only within Ray

    keep_scaling(home, needed_order(home))


def _order(
    config: Path, on: ClusterHost, nodes: int, most: int, address: str | None, options: tuple[str, ...]
) -> ClusterOrder:
    """Return the order of a cluster.

    Raises:
        ConfigError: the options do not fit each other, or the configuration cannot be that of a cluster.
    """
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
    given, has_database = _given(config), False
    if STORE_URL not in given and not _has_store(config):
        if on is not ClusterHost.HERE or not is_installed():
            raise ConfigError(f"{config}: {MISSING}")
        given[STORE_URL], has_database = OwnDatabase(folder_of(config)).url, True
        os.environ[STORE_URL] = given[STORE_URL]
    host = LOOPBACK_HOST if on is ClusterHost.HERE else "0.0.0.0"  # noqa: S104 - other nodes must reach it
    loaded = load_config(config, {"host": host})
    if loaded.store.url in LOCAL:
        raise ConfigError(f"{config}: store.url {loaded.store.url} is of one node; {MISSING}")
    given[STORE_URL] = loaded.store.url
    if most > nodes and on is ClusterHost.RAY and not loaded.server.api_keys:
        raise ConfigError(f"--max: nodes are asked how long turns wait, with a key of {API_KEYS} or server.api_keys")
    return ClusterOrder(
        on=on,
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


def _given(config: Path) -> dict[str, str]:
    """Return the variables that nodes need, with their values here."""
    named = {*named_variables(config), API_KEYS, STORE_URL}
    return {name: os.environ[name] for name in sorted(named) if os.environ.get(name)}


def _has_store(config: Path) -> bool:
    document, _ = parse_document(read_text(config), str(config))
    store = document.get("store") if isinstance(document, dict) else None
    return isinstance(store, dict) and "url" in store


def _state_dir(config: Path, state_dir: Path) -> str:
    """Return the folder of states; a home is each machine's own."""
    return str(state_dir if str(state_dir).startswith("~") else config.resolve().parent / state_dir)


def _command() -> tuple[str, ...]:
    program = os.environ.get(PROGRAM)
    return (program,) if program else (sys.executable, "-m", "service.cli.main")


def _check_same(before: ClusterOrder, order: ClusterOrder, folder: Path) -> None:
    """Check that a cluster which is up is the one that is asked for; ``here`` and ``ssh`` may get more nodes.

    Raises:
        ConfigError: it is another.
    """
    grows = order.on in {ClusterHost.HERE, ClusterHost.SSH} and order.nodes >= before.nodes
    is_same = (before.address, before.options) == (order.address, order.options)
    if is_same and (grows or (before.nodes, before.most) == (order.nodes, order.most)):
        return
    raise _is_up(before, folder)


def _is_up(before: ClusterOrder, folder: Path) -> ConfigError:
    size = f"--on {before.on} --nodes {before.nodes}" + (f" --max {before.most}" if before.most > before.nodes else "")
    return ConfigError(f"a cluster is up with {size} ({folder}); 'roundhouse cluster down' ends it first")


def _place(folder: Path, order: ClusterOrder) -> ClusterPlace:
    module, _, name = PLACES[order.on].partition(":")
    place: ClusterPlace = getattr(import_module(module), name)(folder, order)
    return place


def _newest(seats: list[Seat]) -> list[Seat]:
    """Return the last node of each address: an earlier one there has ended."""
    latest = {(seat.address, seat.port): seat for seat in sorted(seats, key=lambda each: -each.seen_s)}
    return sorted(latest.values(), key=lambda each: (each.address, each.port))


def _wait_for_seats(folder: Path, order: ClusterOrder) -> list[Seat]:
    """Return the nodes once the database has seen all of them.

    Raises:
        ClusterFailed: it has not in time.
    """
    end = time.monotonic() + START_S
    while True:
        fault, seats = "", list[Seat]()
        try:
            seats = [seat for seat in anyio.run(read_seats, order.store_url) if seat.seen_s <= FRESH_S]
        except StoreUnavailable as error:
            fault = f"; {error}"
        if len(seats) >= order.nodes:
            return seats
        if time.monotonic() > end:
            placed = "; ".join(f"{where}: {state}" for where, state in _place(folder, order).describe().items())
            raise ClusterFailed(
                f"{len(seats)} of {order.nodes} nodes are on the database after {START_S:g} s{fault}: {placed};"
                f" logs are in {folder}; 'roundhouse cluster down' ends what was started"
            )
        time.sleep(LOOK_S)
