"""What another program of this process would be made of, in a digest: it must be the same that was looked at."""

import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("service", "workers", "transport", "roundhouse_client")


def fingerprint(files: Iterable[Path]) -> str:
    """Return a digest of some files and of the code as they are on the disk now."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            digest.update(repr(str(file)).encode() + file.read_bytes())
        except OSError as error:
            digest.update(repr((str(file), error.errno)).encode())
    for spec in map(find_spec, PACKAGES):
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for source in sorted(Path(folder).rglob("*.py")):
                digest.update(repr(_state_of(source)).encode())
    return digest.hexdigest()


def _state_of(file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), found.st_mtime_ns, found.st_size
