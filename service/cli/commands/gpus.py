"""The command that shows devices, and how a configuration divides them into lanes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from service.cli.displays.console import plain

UNKNOWN = "?"


def gpus(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", envvar="ROUNDHOUSE_CONFIG", help="Also show the engines and lanes of this configuration."
        ),
    ] = None,
    *,
    enable_mig: Annotated[bool, typer.Option("--enable-mig", help="Use slices of GPUs in MIG mode.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the GPUs and MIG slices of this machine, and what a configuration puts on them. Nothing is started."""
    from service.config.lane_plan import plan_of  # noqa: PLC0415 - its imports take a second

    plan = plan_of(config, enable_mig=enable_mig)
    if as_json:
        typer.echo(json.dumps(plan))
        return
    console = Console(emoji=False)
    _print_devices(console, plan["devices"], is_any_hidden=bool(plan["hidden"]))
    for each in plan["hidden"]:
        what = ", ".join(plain(each[key]) for key in ("uuid", "name") if each[key])
        console.print(f"GPU {each['index']}{what and f' ({what})'}: {plain(each['because'])}", markup=False)
    if config is not None:
        _print_engines(console, plan["engines"])
        _print_lanes(console, plan["lanes"])


def _print_devices(console: Console, devices: Sequence[Mapping[str, Any]], *, is_any_hidden: bool) -> None:
    if not devices:
        console.print("no GPU may be used: lanes are on the CPU" if is_any_hidden else "no GPU: lanes are on the CPU")
        return
    table = Table("index", "name", "memory", "uuid", box=None)
    for device in devices:
        table.add_row(str(device["index"]), plain(device["name"]), _memory(device["memory_mib"]), plain(device["uuid"]))
        for each in device.get("mig", ()):
            table.add_row("", f"  MIG {plain(each['profile'])}", _memory(each["memory_mib"]), plain(each["uuid"]))
    console.print(table, markup=False)


def _print_engines(console: Console, engines: Sequence[Mapping[str, Any]]) -> None:
    """Show the engines that run all the time, if there are any."""
    if not engines:
        return
    table = Table("worker", "devices", "threads", box=None)
    for engine in engines:
        devices = ", ".join(map(plain, engine["devices"])) or "CPU"
        table.add_row(plain(engine["worker"]), devices, str(engine["threads"] or "-"))
    console.print(table, markup=False)


def _print_lanes(console: Console, lanes: Sequence[Mapping[str, Any]]) -> None:
    table = Table("lane", "device", "layout", "its part", "port", "loaded first", "needs", box=None)
    for lane in lanes:
        residents = ", ".join(map(plain, lane["resident"])) or "-"
        table.add_row(
            lane["lane"], plain(lane["device"]), lane["layout"], _memory(lane["memory_mib"]), str(lane["port"]),
            residents, _memory(lane["need_mib"]) if lane["resident"] else "-",
        )  # fmt: skip
    console.print(table, markup=False)
    for device, room in {lane["device"]: lane["room_mib"] for lane in lanes}.items():
        needs = [lane["need_mib"] for lane in lanes if lane["device"] == device and lane["resident"]]
        if needs:
            console.print(f"{plain(device)}: {_sum(needs)} of {_memory(room)} taken", markup=False)


def _memory(mib: int | None) -> str:
    return UNKNOWN if mib is None else f"{mib} MiB"


def _sum(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    parts = [_memory(sum(known))] if known else []
    return " + ".join([*parts, UNKNOWN] if len(known) < len(sizes) else parts)
