"""The files of a checkpoint: fetched where they have a name of a hub or of Roundhouse's own, and checked for an engine.

The files show whether a checkpoint is an adapter or a base.
"""

import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from service.config.workers import OWN_PREFIX, REPOSITORY, SMALL, TINY, TINY_MODEL
from workers.adapters.validation import CONFIG, MAX_CONFIG_BYTES, check_gguf, check_peft, is_gguf_adapter
from workers.engine.launch import command_for
from workers.engine.launch.vllm import most_rank
from workers.errors import InvalidAdapter, InvalidSpec
from workers.files.gguf_header import is_gguf
from workers.models.hub_cache import hub_settings
from workers.models.hub_name import PREFIX, parse_hub_name
from workers.models.small_model import ensure_small_model, small_model_path
from workers.spec import LLAMA_CPP, EngineKind, WorkerSpec

GGUF: Final = ".gguf"
NAME_CHARS: Final = 200


def fetch_checkpoint(name: str, engine: EngineKind) -> str:
    """Return the path of a checkpoint of a hub or of Roundhouse's own, which is there then; others stay as given.

    Raises:
        InvalidSpec: the name is not valid, or the engine does not load its files.
        ModelUnavailable: it cannot be fetched.
    """
    if name.startswith(PREFIX):
        from workers.models.hub import ensure_hub_model  # noqa: PLC0415 - only a fetch needs it

        wanted = parse_hub_name(name, is_gguf=engine is not EngineKind.VLLM)
        return str(ensure_hub_model(wanted, hub_settings(os.environ, Path.home())))
    if not name.startswith(OWN_PREFIX):
        return name
    if name not in {SMALL, TINY}:
        raise InvalidSpec(f"model_ckpt: {name} is no model of Roundhouse: {SMALL}, {TINY}")
    if engine not in LLAMA_CPP:
        raise InvalidSpec(f"model_ckpt: {name} is a GGUF file, which {engine} does not load")
    if name == SMALL:
        return str(ensure_small_model())
    from workers.engine.embedded.tiny_model import ensure_tiny_model  # noqa: PLC0415 - it takes a while

    return str(ensure_tiny_model(small_model_path().with_name(TINY_MODEL)))


def base_of(checkpoint: str) -> str | None:
    """Return the base of an adapter, None where it names none; a checkpoint that is no adapter is its own.

    Raises:
        InvalidSpec: the file that says so cannot be read.
    """
    path = Path(checkpoint)
    config = path / CONFIG
    try:
        is_adapter = config.is_file() and not (path / "config.json").is_file()  # else it was merged into its base
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        raise InvalidSpec(f"model_ckpt: {checkpoint[:NAME_CHARS]} cannot be looked at: {error}") from error
    if is_adapter:
        try:
            with config.open("rb") as opened:
                base = msgspec.json.decode(opened.read(MAX_CONFIG_BYTES), type=dict).get("base_model_name_or_path")
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidSpec(f"model_ckpt: {config} cannot be read: {error}") from error
        if not isinstance(base, str) or not base:
            return None
        try:
            beside = path / base
            return str(beside.resolve()) if not Path(base).is_absolute() and beside.exists() else base
        except (OSError, ValueError) as error:  # a name that is too long, or with a NUL
            raise InvalidSpec(f"model_ckpt: {config} names a base that is no path: {error}") from error
    if path.suffix == GGUF and path.is_file():
        return None if is_gguf_adapter(path) else checkpoint
    return checkpoint


def check_adapter(spec: WorkerSpec, checkpoint: str) -> None:
    """Check that an engine can take an adapter, as far as its files tell: with another it would not start.

    Raises:
        InvalidSpec: it does not.
    """
    try:
        if spec.engine is EngineKind.VLLM:
            check_peft(Path(checkpoint), spec.model, most_rank(spec))
        else:
            check_gguf(Path(checkpoint))
    except (InvalidAdapter, OSError) as error:
        raise InvalidSpec(f"model_ckpt: {checkpoint} is no adapter that {spec.engine} takes: {error}") from error


def check_spec(spec: WorkerSpec) -> None:
    """Check that the program and the file of an engine exist, as far as that is visible here.

    Raises:
        InvalidSpec: one of them does not.
    """
    program = command_for(spec, os.environ).argv[0]
    if shutil.which(program) is None:
        raise InvalidSpec(f"command: no such program: {program!r}")
    checkpoint = Path(str(spec.model))
    # llama-server and vLLM fetch a repository by its id themselves.
    may_be_id = spec.engine is not EngineKind.EMBEDDED and REPOSITORY.match(str(spec.model))
    is_path = checkpoint.is_absolute() or checkpoint.suffix == GGUF or not may_be_id
    if not is_path or spec.command:
        return
    if not spec.model or not checkpoint.exists():
        raise InvalidSpec(f"model_ckpt: there is no {checkpoint if spec.model else 'checkpoint without a name'}")
    if spec.engine is EngineKind.VLLM:
        if not checkpoint.is_dir():
            raise InvalidSpec(f"model_ckpt: {checkpoint} is no folder of a checkpoint, which vllm loads")
    elif not is_gguf(checkpoint):
        raise InvalidSpec(f"model_ckpt: {checkpoint} is no GGUF file that can be read, which {spec.engine} loads")
