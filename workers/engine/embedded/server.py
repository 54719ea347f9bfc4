"""The embedded engine's program: takes llama-server's flags and runs llama.cpp's server from the xllamacpp wheel.

The wheel parses no argv, so the table below says which of llama-server's flags set which field of its parameters. A
flag that is not in the table is refused with exit status 2, as llama-server refuses one that it does not know.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import xllamacpp

KEY = "LLAMA_API_KEY"  # llama-server's own name for it


def _set(path: str) -> Callable[[object, object], None]:
    *owners, field = path.split(".")

    def apply(params: object, value: object) -> None:
        for owner in owners:
            params = getattr(params, owner)
        setattr(params, field, value)

    return apply


def _hosts(params: object, value: object) -> None:
    params.hostnames = [value]  # type: ignore[attr-defined]


def _alias(params: object, value: object) -> None:
    params.model_alias = {value}  # type: ignore[attr-defined]


def _pooling(params: object, value: object) -> None:
    """Set the pooling by llama-server's name for it."""
    import xllamacpp  # noqa: PLC0415 - checking flags must not load the engine

    kinds = xllamacpp.llama_pooling_type
    params.pooling_type = kinds[f"LLAMA_POOLING_TYPE_{str(value).upper()}"]  # type: ignore[attr-defined]


def _adapters(params: object, value: object) -> None:
    """Set adapters from FILE:SCALE,… as llama-server does."""
    import xllamacpp  # noqa: PLC0415

    pairs = (part.rpartition(":") for part in str(value).split(","))
    params.lora_adapters = [  # type: ignore[attr-defined]
        xllamacpp.CommonAdapterLoraInfo(file, float(scale)) for file, _, scale in pairs
    ]


VALUES: dict[tuple[str, ...], tuple[type, Callable[[object, object], None]]] = {
    ("-m", "--model"): (str, _set("model.path")),
    ("-a", "--alias"): (str, _alias),
    ("--host",): (str, _hosts),
    ("--port",): (int, _set("port")),
    ("-np", "--parallel"): (int, _set("n_parallel")),
    ("-c", "--ctx-size"): (int, _set("n_ctx")),
    ("--kv-unified-per-slot",): (int, _set("kv_unified_per_slot")),
    ("-b", "--batch-size"): (int, _set("n_batch")),
    ("-ub", "--ubatch-size"): (int, _set("n_ubatch")),
    ("-n", "--predict", "--n-predict"): (int, _set("n_predict")),
    ("-t", "--threads"): (int, _set("cpuparams.n_threads")),
    ("-tb", "--threads-batch"): (int, _set("cpuparams_batch.n_threads")),
    ("--threads-http",): (int, _set("n_threads_http")),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): (int, _set("n_gpu_layers")),
    ("-mg", "--main-gpu"): (int, _set("main_gpu")),
    ("-to", "--timeout"): (int, _set("timeout_read")),
    ("--cache-ram",): (int, _set("cache_ram_mib")),
    ("--cache-reuse",): (int, _set("n_cache_reuse")),
    ("-sps", "--slot-prompt-similarity"): (float, _set("slot_prompt_similarity")),
    ("--slot-save-path",): (str, _set("slot_save_path")),
    ("--sse-ping-interval",): (int, _set("sse_ping_interval")),
    ("--chat-template",): (str, _set("chat_template")),
    ("--lora-scaled",): (str, _adapters),
    ("--pooling",): (str, _pooling),
    ("--seed", "-s"): (int, _set("sampling.seed")),
    ("--temp",): (float, _set("sampling.temp")),
}
SWITCHES: dict[tuple[str, ...], tuple[bool, Callable[[object, object], None]]] = {
    ("--metrics",): (True, _set("endpoint_metrics")),
    ("--slots",): (True, _set("endpoint_slots")),
    ("--no-slots",): (False, _set("endpoint_slots")),
    ("--props",): (True, _set("endpoint_props")),
    ("--kv-unified", "-kvu"): (True, _set("kv_unified")),
    ("--no-kv-unified", "-no-kvu"): (False, _set("kv_unified")),
    ("--warmup",): (True, _set("warmup")),
    ("--no-warmup",): (False, _set("warmup")),
    ("--embeddings", "--embedding"): (True, _set("embedding")),
    ("--cont-batching", "-cb"): (True, _set("cont_batching")),
    ("--no-cont-batching", "-nocb"): (False, _set("cont_batching")),
    ("--context-shift",): (True, _set("ctx_shift")),
    ("--no-context-shift",): (False, _set("ctx_shift")),
    ("--jinja",): (True, _set("use_jinja")),
    ("--no-jinja",): (False, _set("use_jinja")),
    ("--cache-prompt",): (True, _set("cache_prompt")),
    ("--no-cache-prompt",): (False, _set("cache_prompt")),
}


def _fill(parser: argparse.ArgumentParser) -> None:
    for flags, (kind, _) in VALUES.items():
        parser.add_argument(*flags, type=kind, dest=flags[0], required="--model" in flags)
    for flags, (value, _) in SWITCHES.items():
        parser.add_argument(*flags, action="store_const", const=value, dest=flags[0])


class _Refusing(argparse.ArgumentParser):
    """Raises the message that it would print."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def fault_of(argv: list[str]) -> str | None:
    """Return why the program would refuse these flags; None if it accepts them."""
    parser = _Refusing(allow_abbrev=False, add_help=False)
    _fill(parser)
    try:
        parser.parse_args(argv)
    except ValueError as error:
        return str(error)
    return None


def parse(argv: list[str]) -> "xllamacpp.CommonParams":
    """Return the parameters for ``argv``; an unknown flag, or a value of the wrong kind, exits with 2."""
    import xllamacpp  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="roundhouse-embedded", description=__doc__, allow_abbrev=False)
    _fill(parser)
    given = vars(parser.parse_args(argv))
    params = xllamacpp.CommonParams()
    params.warmup = False  # a first request warms a small model just as well, and readiness comes sooner
    params.endpoint_metrics = False  # llama-server's default; the wheel's own is on
    for flags, (_, apply) in (*VALUES.items(), *SWITCHES.items()):
        if given[flags[0]] is not None:
            apply(params, given[flags[0]])
    if KEY in os.environ:
        params.api_keys = [os.environ[KEY]]
    if not Path(params.model.path).is_file():
        parser.error(f"model file {params.model.path} is not there")
    return params


def main() -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once."""
    try:
        import xllamacpp  # noqa: PLC0415
    except ImportError as error:
        needs = "; install libgomp1 (Debian, Ubuntu) or libgomp (Fedora, SUSE)" if "libgomp" in str(error) else ""
        sys.exit(f"roundhouse-embedded: the library of the engine cannot be loaded: {error}{needs}")
    # Blocked before the server starts its threads, so that the signal reaches only sigwait below.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = xllamacpp.Server(parse(sys.argv[1:]))
    print(f"roundhouse-embedded: serving at {server.listening_address}", flush=True)
    signal.sigwait(signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("roundhouse-embedded: stopping", flush=True)
    del server


if __name__ == "__main__":
    main()
