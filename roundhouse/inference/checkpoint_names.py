"""Checkpoints by name: those of a hub and Roundhouse's own are fetched or made, and become paths."""

import os
from pathlib import Path
from typing import Final

from service.config.workers import OWN_PREFIX, SMALL, TINY, TINY_MODEL
from workers.errors import InvalidSpec
from workers.models.hub_cache import find_kept, hub_settings
from workers.models.hub_name import PREFIX, parse_hub_name
from workers.models.small_model import ensure_small_model, small_model_path
from workers.spec import EngineKind

_GGUF_ENGINES: Final = frozenset({EngineKind.EMBEDDED, EngineKind.LLAMA_SERVER})


def fetch_checkpoint(name: str, engine: EngineKind) -> str:
    """Return the path of a checkpoint of a hub or of Roundhouse's own, there once this returns; others stay as given.

    Raises:
        InvalidSpec: it is none, or the engine does not load its files.
        ModelUnavailable: it cannot be fetched.
    """
    if name.startswith(PREFIX):
        return _of_hub(name, engine)
    if not name.startswith(OWN_PREFIX):
        return name
    if name not in {SMALL, TINY}:
        raise InvalidSpec(f"model_ckpt: {name} is no model of Roundhouse: {SMALL}, {TINY}")
    if engine not in _GGUF_ENGINES:
        raise InvalidSpec(f"model_ckpt: {name} is a GGUF file, which {engine} does not load")
    return str(ensure_small_model() if name == SMALL else _tiny())


def _of_hub(name: str, engine: EngineKind) -> str:
    from workers.models.hub import ensure_hub_model  # noqa: PLC0415 - what fetches is loaded where something is fetched

    wanted = parse_hub_name(name, is_gguf=engine is not EngineKind.VLLM)
    settings = hub_settings(os.environ, Path.home())
    ensure_hub_model(wanted, settings)
    kept = find_kept(wanted, settings.cache)
    if kept is None:
        raise InvalidSpec(f"model_ckpt: {name} was fetched, and is not in {settings.cache}")
    return str(kept)


def _tiny() -> Path:
    from workers.engine.embedded.tiny_model import ensure_tiny_model  # noqa: PLC0415 - it takes a while

    path = small_model_path().with_name(TINY_MODEL)
    ensure_tiny_model(path)
    return path
