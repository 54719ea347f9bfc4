"""Where callers may have files read from: adapters and checkpoints lie below one of the operator's folders."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from service.config.schema import Config

MOST_FILES: Final = 10_000  # of a folder that are looked at


def roots_of(config: Config, base: Path) -> list[Path]:
    """Return the folders of ``server.roots``; without any, that of the configuration and each model's own."""
    given = config.server.roots
    if given:
        return [(base / root.expanduser()).resolve() for root in given]
    models = [(base / Path(model.model).expanduser()).resolve() for model in config.models.values() if model.model]
    folders = (path if path.is_dir() else path.parent for path in models if path.exists())
    return list(dict.fromkeys((base.resolve(), *folders)))


def outside_with_files(roots: Sequence[Path], path: Path) -> str | None:
    """Return why a path, or a file that lies in it as a folder, may not be read; None where all may.

    A link below the roots may lead out of them.
    """
    fault = outside_of(roots, path)
    if fault is not None or not path.is_dir():
        return fault
    try:
        files = list(islice(path.iterdir(), MOST_FILES))
    except OSError:
        return f"{path} cannot be read"
    return next((fault for fault in (outside_of(roots, file) for file in files) if fault is not None), None)


def outside_of(roots: Sequence[Path], path: Path) -> str | None:
    """Return why a path may not be read, None where it may.

    What lies elsewhere is refused in the same words whether it is there or not: a caller is not to find that out.
    """
    try:
        resolved = path.resolve()
        resolved.exists()
        if any(resolved.is_relative_to(root) for root in roots):
            return None
    except (OSError, ValueError, RuntimeError):  # a NUL in it, links that lead in a circle, a name that is too long
        pass
    return f"{path} lies in none of server.roots: {', '.join(map(str, roots))}"
