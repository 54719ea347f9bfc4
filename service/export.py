"""Transcripts as files: one per conversation, a manifest and an index (specification, "Exported files").

Each file is replaced atomically, so that none is ever partial. Manifest and index change together: both are links into
a folder of the newest lists, and one link to that folder is replaced. A lock keeps writers apart.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from service.conversations.job.states import ConversationState, TurnState
from service.errors import ConfigError, StoreError
from workers.files.atomic import replace_file

MAX_NAME_BYTES: Final = 255  # longest file name on every file system in use
LISTS: Final = ".lists"  # the folder behind manifest.json and index.jsonl
LOCK_LIMIT_S: Final = 30.0
LOCK_POLL_S: Final = 0.01


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation as the index lists it."""

    id: str
    state: str
    reason: str | None
    turns: int
    file: str


class Export:
    """The folder of one job: ``transcripts/<id>.json``, ``manifest.json``, ``index.jsonl``.

    Source: specification, "Exported files".
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Exported] = {}
        self.job_state: object = None  # the state in the manifest

    def __repr__(self) -> str:
        return f"<Export {self._folder} conversations={len(self._done)}>"

    def __contains__(self, conversation_id: object) -> bool:
        """Whether a conversation is written."""
        return conversation_id in self._done

    def write(self, job: Mapping[str, object], transcripts: Sequence[Mapping[str, object]]) -> None:
        """Write the transcripts of newly ended conversations, then both lists at once.

        ``job`` holds the manifest's fields of the job. A kill at any moment leaves lists that agree and name only
        files that are there. It blocks, so call it off the event loop.

        Raises:
            StoreError: a file cannot be written.
        """
        try:
            with self._locked():
                (self._folder / "transcripts").mkdir(parents=True, exist_ok=True)
                self._write(job, transcripts)
        except OSError as error:
            raise StoreError(f"{self._folder}: cannot write transcripts: {error}") from error

    @property
    def owner(self) -> str | None:
        """The id of the transcripts' job; None without transcripts, or if it is not known."""
        owner = self.manifest.get("id")
        return owner if isinstance(owner, str) else None

    @property
    def manifest(self) -> Mapping[str, object]:
        """The manifest; empty if it is missing or cannot be read."""
        try:
            document = msgspec.json.decode((self._folder / "manifest.json").read_bytes())
        except (FileNotFoundError, msgspec.MsgspecError):
            return {}
        return document if isinstance(document, dict) else {}

    @property
    def is_whole(self) -> bool:
        """Whether every transcript that the index names is there."""
        return all((self._folder / entry.file).is_file() for entry in _index(self._folder))

    def _write(self, job: Mapping[str, object], transcripts: Sequence[Mapping[str, object]]) -> None:
        for transcript in transcripts:
            name = str(transcript["id"])
            file = f"transcripts/{name}.json"
            replace_file(self._folder / file, msgspec.json.format(msgspec.json.encode(transcript), indent=2) + b"\n")
            turns = transcript["turns"]
            self._done[name] = Exported(
                id=name,
                state=str(transcript["state"]),
                reason=None if transcript["reason"] is None else str(transcript["reason"]),
                turns=len(turns) if isinstance(turns, list) else 0,
                file=file,
            )
        lines = [msgspec.json.encode(entry) + b"\n" for entry in self._done.values()]
        states = {entry.id: {"state": entry.state, "reason": entry.reason} for entry in self._done.values()}
        manifest = msgspec.json.encode({**job, "conversations": states})
        self._replace_lists(
            {"index.jsonl": b"".join(lines), "manifest.json": msgspec.json.format(manifest, indent=2) + b"\n"}
        )
        self.job_state = job["state"]

    def _replace_lists(self, contents: Mapping[str, bytes]) -> None:
        lists = self._folder / LISTS
        fresh = Path(tempfile.mkdtemp(dir=lists, prefix="v"))
        fresh.chmod(0o755)
        for name, content in contents.items():
            replace_file(fresh / name, content)
        _link(lists / "current", fresh.name)
        for name in contents:
            if not (self._folder / name).is_symlink():
                _link(self._folder / name, f"{LISTS}/current/{name}")
        for stale in lists.glob("v*"):
            if stale != fresh:
                shutil.rmtree(stale, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder against other processes for a block.

        Raises:
            TimeoutError: another process keeps holding it (an OSError).
        """
        (self._folder / LISTS).mkdir(parents=True, exist_ok=True)
        with (self._folder / LISTS / "lock").open("ab") as file:
            deadline = time.monotonic() + LOCK_LIMIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process has been writing for {LOCK_LIMIT_S:g} s") from None
                    time.sleep(LOCK_POLL_S)
            yield


def folder_for(output: Path, job_name: str) -> Path:
    """Return the folder of a job of that name.

    Raises:
        ConfigError: the name cannot be a folder's.
    """
    if "/" in job_name or "\0" in job_name or job_name.startswith(".") or len(job_name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(
            f"name: {job_name!r} cannot be the name of a folder under {output}; use letters, digits, - and _"
        )
    return output / job_name


class FailedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that failed, and its known cause."""

    conversation: str
    reason: str
    detail: str


def failures_in(folder: Path) -> Iterator[FailedConversation]:
    """Yield the failed conversations among the transcripts in a job's folder."""
    for entry in _index(folder):
        if entry.state == ConversationState.FAILED:
            yield FailedConversation(
                conversation=entry.id, reason=entry.reason or "", detail=_detail_in(folder / entry.file)
            )


def _detail_in(transcript: Path) -> str:
    """Return the cause of the first failed turn in a transcript."""
    try:
        turns = msgspec.json.decode(transcript.read_bytes())["turns"]
        failed = next(turn for turn in turns if turn["state"] == TurnState.FAILED)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, StopIteration):
        return "see its transcript"
    return str(failed.get("detail") or failed.get("reason") or "see its transcript")


def _index(folder: Path) -> Iterator[Exported]:
    try:
        lines = (folder / "index.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(line, type=Exported)


def _link(path: Path, target: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
