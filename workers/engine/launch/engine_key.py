"""The key that an engine requires, if its operator has given one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workers.engine.launch.flags import named
from workers.errors import InvalidSpec
from workers.spec import EngineKind, WorkerSpec

VARIABLES: Final[Mapping[EngineKind, str]] = {
    EngineKind.LLAMA_SERVER: "LLAMA_API_KEY",
    EngineKind.EMBEDDED: "LLAMA_API_KEY",
    EngineKind.VLLM: "VLLM_API_KEY",
}


def operators_key(spec: WorkerSpec) -> str | None:
    """Return the key that ``args`` or ``env`` give the engine, the first of several; None without one.

    Raises:
        InvalidSpec: it cannot be read.
    """
    given = named(spec.args)
    key = given.get("api-key")
    if isinstance(key, list | tuple):
        key = key[0] if key else None
    if key is not None:
        return str(key).partition(",")[0]
    file = given.get("api-key-file")
    if file is not None:
        try:
            path = (spec.folder or Path()) / str(file)  # as the engine finds it
            return next(iter(path.read_text(encoding="utf-8").split()), None)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"args.api-key-file: {file}: cannot be read: {error}") from error
    return spec.env.get(VARIABLES[spec.engine])
