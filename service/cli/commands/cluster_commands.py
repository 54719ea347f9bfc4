"""``cluster``: nodes on several machines, started, shown and ended by one command."""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import anyio
import msgspec
import typer
from rich.table import Table

from service.cli.connection import JsonOption, print_document
from service.cli.conventions import FILE, Exit
from service.cli.displays.console import plain
from service.cluster.failure import ClusterFailed
from service.cluster.machine import become_node, nodes_here, start_nodes, stop_nodes
from service.cluster.new_order import new_order
from service.cluster.order import FILE as ORDER
from service.cluster.order import (
    PRIVATE,
    ClusterHost,
    ClusterOrder,
    folder_of,
    make_folder,
    needed_order,
    read_order,
    write_order,
)
from service.cluster.own_database import OwnDatabase
from service.cluster.place import ClusterPlace
from service.errors import ConfigError, StoreUnavailable
from service.store.seats import Seat, read_seats

LOOK_S: Final = 0.25
LOOKS_A_DESCRIPTION: Final = 20  # a scheduler is asked once in so many looks
ENDED: Final = "ended"  # in a place's description: waiting longer is of no use
START_S: Final = 180.0  # until all nodes are on the database
FRESH_S: Final = 3.0  # a node that the database has not seen for longer is not counted
PLACES: Final[Mapping[ClusterHost, str]] = {
    ClusterHost.HERE: "service.cluster.shells:HerePlace",
    ClusterHost.SSH: "service.cluster.shells:SshPlace",
    ClusterHost.SLURM: "service.cluster.slurm:SlurmPlace",
    ClusterHost.RAY: "service.cluster.ray_place:RayPlace",
    ClusterHost.KUBERNETES: "service.cluster.kubernetes:KubernetesPlace",
}
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
    order = new_order(config, on, nodes, most or nodes, address, tuple(options or ()))
    make_folder(folder)
    with _alone(folder):
        if before is not None:
            _check_same(before, order, folder)
            has_database = before.has_database or order.has_database
            order = msgspec.structs.replace(order, mark=before.mark, job=before.job, has_database=has_database)
            if before.digest != order.digest:
                typer.echo("nodes that run keep the configuration that they have read: roundhouse reload", err=True)
        order = _start(folder, order, is_first=before is None)
        if on is ClusterHost.KUBERNETES:
            typer.echo("installed; roundhouse cluster status shows its pods")
            return
        for seat in _wait_for_seats(folder, order):
            typer.echo(seat.url)


def _start(folder: Path, order: ClusterOrder, *, is_first: bool) -> ClusterOrder:
    """Start what does not run; if the first start of a cluster fails, what it has started is ended.

    The order stays if the database still sees a node of it: ``down`` needs it then.
    """
    if order.has_database:
        OwnDatabase(folder).start()
    if order.on is not ClusterHost.KUBERNETES:
        anyio.run(read_seats, order.store_url)  # nodes would wait for a database that is not there
    write_order(folder, order)
    place = _place(folder, order)
    try:
        order = place.start()
    except (ClusterFailed, ConfigError):
        if is_first:
            with suppress(ClusterFailed, ConfigError):  # a machine that cannot be reached has started nothing
                place.stop()
            with suppress(ClusterFailed):
                _check_gone(order)
                _forget(folder, order)
        raise
    write_order(folder, order)
    return order


def _forget(folder: Path, order: ClusterOrder) -> None:
    if order.has_database:
        OwnDatabase(folder).stop()
    (folder / ORDER).unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other commands away from a cluster for a block.

    Raises:
        ConfigError: one is at work.
    """
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"{folder}: another 'roundhouse cluster' is at work on it; wait for its end") from error
    finally:
        os.close(handle)


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
            seats = _newest(_seats(order))
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
        table.add_row(seat.url, state)
    if fault:
        table.add_row("database", plain(fault))
    print_document(document, table, as_json=as_json)
    if order.on is not ClusterHost.KUBERNETES and sum(seat.seen_s <= FRESH_S for seat in seats) < order.nodes:
        raise typer.Exit(Exit.FAILED)


@cluster.command()
def down(
    config: ConfigHereOption = Path(FILE),
    *,
    force: Annotated[bool, typer.Option("--force", help="Forget nodes that cannot be reached.")] = False,
) -> None:
    """Drain all nodes of a cluster and end them. Jobs stay in the database."""
    folder = folder_of(config)
    order = needed_order(folder)
    with _alone(folder):
        try:
            for where, how in _place(folder, order).stop().items():
                typer.echo(f"{plain(where)}: {plain(how)}")
            _check_gone(order)
        except ClusterFailed as error:
            if not force:
                raise ClusterFailed(
                    f"{error}\n'roundhouse cluster down --force' forgets what does not answer"
                ) from error
            typer.echo(plain(str(error)), err=True)
        _forget(folder, order)
        if order.has_database:
            typer.echo("its database: stopped; its files stay")


def _check_gone(order: ClusterOrder) -> None:
    """Check that the database sees no node of the cluster any more, wherever it may run.

    Raises:
        ClusterFailed: it does, or it does not answer.
    """
    if order.on is ClusterHost.KUBERNETES:
        return
    end = time.monotonic() + FRESH_S + 1.0
    try:
        while left := [seat for seat in _seats(order) if seat.seen_s <= FRESH_S]:
            if time.monotonic() > end:
                urls = ", ".join(seat.url for seat in left)
                raise ClusterFailed(f"these nodes run on: {urls}; end them where they run")
            time.sleep(LOOK_S)
    except StoreUnavailable as error:
        raise ClusterFailed(f"whether nodes run on is not known: {error}") from error


def _seats(order: ClusterOrder) -> list[Seat]:
    """Return the nodes of this cluster that its database knows.

    Raises:
        StoreUnavailable: it does not answer.
    """
    return [seat for seat in anyio.run(read_seats, order.store_url) if seat.id.startswith(f"{order.mark}-")]


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
    began, looks = time.monotonic(), 0
    end = began + START_S
    while True:
        fault, seats = "", list[Seat]()
        try:
            seats = [seat for seat in _newest(_seats(order)) if seat.seen_s <= FRESH_S]
        except StoreUnavailable as error:
            fault = f"; {error}"
        if len(seats) >= order.nodes:
            return seats
        looks += 1
        placed = _place(folder, order).describe() if looks % LOOKS_A_DESCRIPTION == 0 else {}
        has_ended = any(ENDED in state for state in placed.values())
        if has_ended or time.monotonic() > end:
            placed = placed or _place(folder, order).describe()
            shown = "; ".join(f"{where}: {state}" for where, state in placed.items())
            took_s = time.monotonic() - began
            raise ClusterFailed(
                f"{len(seats)} of {order.nodes} nodes are on the database after {took_s:.0f} s{fault}: {shown};"
                f" logs are in {folder}; 'roundhouse cluster down' ends what was started"
            )
        time.sleep(LOOK_S)
