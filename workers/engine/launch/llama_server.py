"""llama-server, and what takes its flags: argv and environment from a specification. Pure.

Source: llama.cpp, ``tools/server/README.md``. What its defaults leave to chance is always given: the port, the slots,
the context, and that each slot has its own part of the context. With a unified cache one long slot can make the engine
fail all the others: so it has one only with ``capacity: tokens``, where ``workers.requests.kv_pool`` looks after it.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from workers.engine.launch.flags import named, refuse_owned, render_flags
from workers.errors import InvalidSpec
from workers.process.child import Command
from workers.spec import EngineKind, Flag, WorkerSpec

PROGRAMS: Final[Mapping[EngineKind, tuple[str, ...]]] = {
    EngineKind.LLAMA_SERVER: ("llama-server",),
    # -P: the program's own folder must not come before the standard library in its module path.
    EngineKind.EMBEDDED: (sys.executable, "-P", str(Path(__file__).parent.parent / "embedded" / "server.py")),
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
OURS: Final = ("ROUNDHOUSE_", "NOTIFY_SOCKET", "WATCHDOG_")  # of the environment
BATCH_FLAGS: Final = frozenset({"b", "batch-size", "ub", "ubatch-size"})
CPU_BATCH: Final = 256  # tokens between two signs of life; the default's 2,048 are minutes on a CPU (bench/batches.py)
# How long a thread that waits for the others spins (GNU libgomp), in iterations: what shares a core with one of them
# stops all. By libgomp's own choice a debate takes 5 to 24 times as long beside two busy processes, so twice
# (bench/beside.py).
SPINS: Final = {"GOMP_SPINCOUNT": "100"}
WAITING: Final = frozenset({*SPINS, "OMP_WAIT_POLICY"})  # whoever gives one of them has chosen
CACHE_FLAGS: Final = frozenset({"kv-unified", "no-kv-unified", "kvu", "no-kvu"})
SHARED: Final = dict.fromkeys((*CACHE_FLAGS, "kv-unified-per-slot"), "capacity")


def llama_server_command(spec: WorkerSpec, environment: Mapping[str, str]) -> Command:
    """Return the command of a llama-server, or of a program that stands in for it.

    Raises:
        InvalidSpec: ``args`` repeats what a key of its own decides.
    """
    refuse_owned(spec.args, OWNED | (SHARED if spec.shares_pool else {}))
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
        env={**for_engines(environment), **spec.device_variables, **_spins(spec, environment), **spec.env},
    )


def _spins(spec: WorkerSpec, environment: Mapping[str, str]) -> Mapping[str, str]:
    is_chosen = not WAITING.isdisjoint({*environment, *spec.env})
    return SPINS if spec.on_cpu and not is_chosen else {}


def adapter_params(loaded: Iterable[str], adapter: str | None) -> dict[str, object]:
    """Return a request's scales of all adapters; one that is left out keeps its slot's prefix.

    ``loaded`` are those that the engine was started with, in the order in which it was given them.
    """
    scales = [{"id": place, "scale": float(name == adapter)} for place, name in enumerate(loaded)]
    return {"lora": scales} if scales else {}


def _adapter_flags(spec: WorkerSpec) -> dict[str, Flag]:
    """Load adapters that are in force only where a request says so.

    A repeated flag would keep the last alone, and a list is cut at commas and colons. The cache in RAM is off: it does
    not know with which adapter a prompt was read (measured with builds of 2026: answers are wrong with it).
    """
    for name, file in spec.adapters.items():
        if "," in file or ":" in file:
            raise InvalidSpec(f"adapters.{name}: llama-server takes no path with a comma or a colon: {file}")
    listed = ",".join(f"{file}:0" for file in spec.adapters.values())
    return {"lora-scaled": listed, "cache-ram": None if "cache-ram" in named(spec.args) else 0}


def for_engines(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what is ours: an engine, and the tools that it may start, have no business with our keys.

    Nor has it with who started us: what systemd hears on that socket it takes for our word.
    """
    return {name: value for name, value in environment.items() if not name.startswith(OURS)}
