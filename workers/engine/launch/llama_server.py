"""llama-server, and programs that take its flags: argv and environment from a specification. Pure.

Source: llama.cpp, ``tools/server/README.md``. Settings whose defaults vary are always given: the port, the slots, the
context, and that each slot has its own part of the context. With a unified cache one long slot can make the engine fail
all the others: so it has one only with ``capacity: tokens``, where ``workers.requests.kv_pool`` manages it.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from workers.devices.visible import CUDA, ORDER, PCI_ORDER, names_numbers
from workers.engine.embedded.server import SWITCHES, VALUES, fault_of
from workers.engine.launch.flags import named, refuse_doubled, refuse_owned, render_flags
from workers.errors import InvalidSpec
from workers.process.child import Command
from workers.spec import EngineKind, Flag, WorkerSpec

PROGRAMS: Final[Mapping[EngineKind, tuple[str, ...]]] = {
    EngineKind.LLAMA_SERVER: ("llama-server",),
    # -P: the program's own folder must not come before the standard library in its module path.
    EngineKind.EMBEDDED: (
        sys.executable,
        "-P",
        str(Path(__file__).absolute().parent.parent / "embedded" / "server.py"),
    ),
}
OWNED: Final = {
    "m": "model",
    "model": "model",
    "hf-repo": "model",
    "host": "host",
    "port": "port",
    "np": "slots",
    "parallel": "slots",
    "c": "context",
    "ctx-size": "context",
}
SHORT: Final = {  # other names of flags that an operator may use
    "t": "threads",
    "b": "batch-size",
    "ub": "ubatch-size",
    "n": "n-predict",
    "predict": "n-predict",
    "ngl": "n-gpu-layers",
    "gpu-layers": "n-gpu-layers",
    "fa": "flash-attn",
    "ctk": "cache-type-k",
    "ctv": "cache-type-v",
    "kvu": "kv-unified",
    "no-kvu": "no-kv-unified",
    "md": "model-draft",
    "cram": "cache-ram",
}
OURS: Final = ("ROUNDHOUSE_", "NOTIFY_SOCKET", "WATCHDOG_")  # prefixes in the environment
BATCH_FLAGS: Final = frozenset({"b", "batch-size", "ub", "ubatch-size"})
CPU_BATCH: Final = 256  # tokens between two signs of life; the default's 2,048 are minutes on a CPU (bench/prompts.py)
# Iterations that a thread spins while it waits for the others (GNU libgomp): a process that shares a core with one of
# them stops all. With libgomp's default a debate takes 5 to 24 times as long beside two busy processes, with this twice
# (bench/studies/beside.py).
SPINS: Final = {"GOMP_SPINCOUNT": "100"}
WAITING: Final = frozenset({*SPINS, "OMP_WAIT_POLICY"})  # an operator who sets one of them has chosen
CACHE_FLAGS: Final = frozenset({"kv-unified", "no-kv-unified", "kvu", "no-kvu"})
SHARED: Final = dict.fromkeys((*CACHE_FLAGS, "kv-unified-per-slot"), "capacity")


def llama_server_command(spec: WorkerSpec, environment: Mapping[str, str]) -> Command:
    """Return the command of a llama-server, or of a program that stands in for it.

    Raises:
        InvalidSpec: ``args`` repeats a flag, or one that a configuration key sets.
    """
    refuse_owned(spec.args, OWNED | (SHARED if spec.shares_pool else {}))
    refuse_doubled(spec.args, SHORT)
    if spec.engine is EngineKind.EMBEDDED and not spec.command:
        _check_embedded(spec.args)
    file = spec.model
    is_path = file is not None and (file.startswith(("/", ".")) or file.endswith(".gguf"))
    flags: dict[str, Flag] = {
        "model": file if is_path else None,
        "hf-repo": None if is_path else file,
        "alias": spec.name,
        "host": spec.host,
        "port": spec.port,
        "parallel": spec.slots,
        "ctx-size": spec.cache_tokens,
        "metrics": True,
        "slots": True,
        "no-kv-unified": not spec.shares_pool and CACHE_FLAGS.isdisjoint(named(spec.args)),
        "kv-unified": spec.shares_pool,
        "threads": spec.threads,
        "kv-unified-per-slot": spec.context if spec.shares_pool else None,
    }
    is_batch_told = not BATCH_FLAGS.isdisjoint(named(spec.args))
    if spec.on_cpu and not is_batch_told:
        flags |= {"batch-size": CPU_BATCH, "ubatch-size": CPU_BATCH}
    if spec.adapters:
        flags |= _adapter_flags(spec)
    program = spec.command or PROGRAMS[spec.engine]
    return Command(
        argv=(*program, *render_flags(flags), *render_flags(spec.args)),
        env={
            **_order(environment, spec.env),
            **for_engines(environment),
            **spec.device_variables,
            **_spins(spec, environment),
            **spec.env,
        },
        folder=None if spec.folder is None else str(spec.folder),
    )


def _check_embedded(args: Mapping[str, Flag]) -> None:
    """Check that the embedded engine accepts an operator's flags, before it fails over them at each start.

    Raises:
        InvalidSpec: it would not; the message has the key of the flag, and its spelling.
    """
    known = (*VALUES, *SWITCHES)
    for name, value in args.items():
        argv = render_flags({name: value})
        fault = fault_of(["--model", "-", *argv])
        if fault is None:
            continue
        group = next((flags for flags in known if f"-{name.lstrip('-')}" in flags), None)
        if argv[0] not in {flag for flags in known for flag in flags}:
            fault = f"the embedded engine has no flag {argv[0]}"
            spelling = None if group is None else " or ".join(repr(flag) for flag in group)
            fault += f"; it is written {spelling}" if spelling else "; engine: llama-server has all of llama.cpp's"
        raise InvalidSpec(f"args.{name}: {fault}")


def _order(*environments: Mapping[str, str]) -> Mapping[str, str]:
    """Make device numbers those of nvidia-smi, as for all our engines; CUDA's own order is by speed."""
    return {ORDER: PCI_ORDER} if any(names_numbers(each.get(CUDA, "")) for each in environments) else {}


def _spins(spec: WorkerSpec, environment: Mapping[str, str]) -> Mapping[str, str]:
    is_chosen = not WAITING.isdisjoint({*environment, *spec.env})
    return SPINS if spec.on_cpu and not is_chosen else {}


def adapter_params(loaded: Iterable[str], adapter: str | None) -> dict[str, object]:
    """Return a request's scales of all adapters; one that is left out keeps its slot's prefix.

    ``loaded`` are those that the engine was started with, in that order.
    """
    scales = [{"id": place, "scale": float(name == adapter)} for place, name in enumerate(loaded)]
    return {"lora": scales} if scales else {}


def _adapter_flags(spec: WorkerSpec) -> dict[str, Flag]:
    """Load adapters that apply only to requests that ask for them.

    A repeated flag would keep only the last, and a list is cut at commas and colons. The cache in RAM is off: it does
    not know with which adapter a prompt was read (measured with builds of 2026: answers are wrong with it).
    """
    for name, file in spec.adapters.items():
        if "," in file or ":" in file:
            raise InvalidSpec(f"adapters.{name}: llama-server takes no path with a comma or a colon: {file}")
    listed = ",".join(f"{file}:0" for file in spec.adapters.values())
    return {"lora-scaled": listed, "cache-ram": None if "cache-ram" in named(spec.args) else 0}


def for_engines(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out our own variables: an engine, and tools that it may start, must not see our keys.

    Nor may it reach the service manager that started us: systemd takes messages on that socket for ours.
    """
    return {name: value for name, value in environment.items() if not name.startswith(OURS)}
