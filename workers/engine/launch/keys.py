"""The key that an engine asks of everybody who speaks to it: the operator's, or a new one at each start. Pure.

Any user of the machine may reach a port of loopback; a key in argv could be read by each of them, one in the
environment only by our own user.
"""

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
    """Return the key that ``args`` or ``env`` give the engine, the first of several; None where there is none.

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
            return next(iter(Path(str(file)).read_text(encoding="utf-8").split()), None)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"args.api-key-file: {file}: cannot be read: {error}") from error
    return spec.env.get(VARIABLES[spec.engine])
