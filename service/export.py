"""Transcripts as files: one a conversation, a manifest and an index, each replaced whole so that none is ever half."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from service.errors import ConfigError, StoreError

MAX_NAME_BYTES: Final = 255  # of one file, on every file system in use


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
        self._is_begun = False
        self.job_state: object = None  # as the manifest has it

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

        Raises:
            StoreError: a file cannot be written.
        """
        try:
            self._begin(str(job["id"]))
            self._write(job, transcripts)
        except OSError as error:
            raise StoreError(f"{self._folder}: cannot write transcripts: {error}") from error

    def _begin(self, job_id: str) -> None:
        """Clear away what another job of that name has left here."""
        if self._is_begun:
            return
        (self._folder / "transcripts").mkdir(parents=True, exist_ok=True)
        manifest = self._folder / "manifest.json"
        if not (manifest.is_file() and _job_of(manifest) == job_id):
            for stale in (manifest, self._folder / "index.jsonl", *(self._folder / "transcripts").glob("*.json")):
                stale.unlink(missing_ok=True)
        self._is_begun = True

    def _write(self, job: Mapping[str, object], transcripts: Sequence[Mapping[str, object]]) -> None:
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
        self.job_state = job["state"]


def folder_for(output: Path, job_name: str) -> Path:
    """Return the folder of a job of that name.

    Raises:
        ConfigError: the name is no name of a folder.
    """
    if "/" in job_name or "\0" in job_name or job_name.startswith(".") or len(job_name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(
            f"name: {job_name!r} cannot be the name of a folder under {output}; use letters, digits, - and _"
        )
    return output / job_name


def _job_of(manifest: Path) -> object:
    try:
        document = msgspec.json.decode(manifest.read_bytes())
    except msgspec.MsgspecError:
        return None
    return document.get("id") if isinstance(document, dict) else None


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
