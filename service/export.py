"""Transcripts as files: one a conversation, a manifest and an index, each replaced whole so that none is ever half."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from service.errors import ConfigError

_FOLDER_NAME: Final = re.compile(r"^[^/\0]{1,200}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One conversation as the index lists it."""

    id: str
    state: str
    reason: str | None
    turns: int
    file: str


class Export:
    """The folder of one job (contract, section 3): ``transcripts/<id>.json``, ``manifest.json``, ``index.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Exported] = {}

    def __repr__(self) -> str:
        """State how many conversations are written."""
        return f"<Export {self._folder} conversations={len(self._done)}>"

    def __contains__(self, conversation_id: object) -> bool:
        """Tell whether a conversation is written."""
        return conversation_id in self._done

    def write(self, job: Mapping[str, object], transcripts: Sequence[Mapping[str, object]]) -> None:
        """Write the transcripts of conversations that have ended since, then the two lists, the manifest last.

        ``job`` is what the manifest says of the job itself. A kill in between leaves lists that name only files that
        are there.
        """
        (self._folder / "transcripts").mkdir(parents=True, exist_ok=True)
        for transcript in transcripts:
            name = str(transcript["id"])
            file = f"transcripts/{name}.json"
            _replace(self._folder / file, msgspec.json.format(msgspec.json.encode(transcript), indent=2) + b"\n")
            turns = transcript["turns"]
            self._done[name] = Exported(
                id=name,
                state=str(transcript["state"]),
                reason=None if transcript["reason"] is None else str(transcript["reason"]),
                turns=len(turns) if isinstance(turns, list) else 0,
                file=file,
            )
        lines = [msgspec.json.encode(entry) + b"\n" for entry in self._done.values()]
        _replace(self._folder / "index.jsonl", b"".join(lines))
        states = {entry.id: {"state": entry.state, "reason": entry.reason} for entry in self._done.values()}
        manifest = msgspec.json.encode({**job, "conversations": states})
        _replace(self._folder / "manifest.json", msgspec.json.format(manifest, indent=2) + b"\n")


def folder_for(output: Path, job_name: str) -> Path:
    """Return the folder of a job of that name.

    Raises:
        ConfigError: the name is no name of a folder.
    """
    if not _FOLDER_NAME.match(job_name) or job_name.startswith("."):
        raise ConfigError(
            f"name: {job_name!r} cannot be the name of a folder under {output}; use letters, digits, - and _"
        )
    return output / job_name


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
