"""The record of an incarnation that broke, so that the one line that mattered is not lost."""

from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from workers.devices.device import DeviceMemory
from workers.health.probes import KernelView
from workers.policy.liveness import Verdict
from workers.process.identity import EngineExit
from workers.spec import WorkerId
from workers.states import WorkerState

TAIL_LINES: Final = 50  # lines of each stream
TAIL_CHARS: Final = 16 * 1024  # letters of each stream: the newest lines that fit
KEPT: Final = 100  # newest incidents of one worker


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons for a verdict; times are in seconds before it, None for never.

    ``silent_s`` counts from the model's last progress, ``last_byte_s`` from any byte at all.
    """

    silent_s: float
    limit_s: float | None = None
    last_byte_s: float | None = None
    prompt_tokens_done: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counters: str | None = None
    counters_rose_s: float | None = None
    cpu_percent: float | None = None
    log_grew_s: float | None = None


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request in flight at one moment; ``held_s`` is the time since it began."""

    id: int
    job_name: str
    verdict: Verdict
    evidence: Evidence
    held_s: float


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One broken incarnation: the decision and its evidence, its end, and its last output.

    An engine that failed a command and still runs gets one too; its ``exit`` is None.
    """

    worker: str
    incarnation: int
    at: datetime
    reason: str
    because: str
    verdict: Verdict | None
    exit: EngineExit | None
    stdout_tail: tuple[str, ...]
    stderr_tail: tuple[str, ...]
    kernel: KernelView
    in_flight: tuple[RequestView, ...]
    finding: str | None = None  # the result of trying the turns that were on it
    model: str | None = None  # None from an older version
    device: str | None = None  # a lane's: its UUID, or "cpu"
    device_memory: DeviceMemory | None = None  # at the last look before
    pools: Mapping[str, int] | None = None  # numbers of waiting and running turns, if the owner counts them


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Incident).decode


class Incidents:
    """The newest incidents of one worker, kept across our restarts if there is a file for them."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        read = _read(file)
        self._kept: deque[Incident] = deque(read, maxlen=KEPT)
        self._written = len(read)

    def __repr__(self) -> str:
        return f"<Incidents {len(self._kept)}>"

    def __iter__(self) -> Iterator[Incident]:
        """Iterate from the newest to the oldest."""
        return iter(tuple(reversed(self._kept)))

    def add(self, incident: Incident) -> None:
        """Keep an incident; a full disk must not stop an engine from being repaired.

        Raises:
            OSError: it is kept only in memory.
        """
        self._kept.append(incident)
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._written < 2 * KEPT:
            with self._file.open("ab") as file:
                file.write(_encode(incident) + b"\n")
            self._written += 1
            return
        self._rewrite(self._file)

    def note_finding(self, incarnation: int, finding: str) -> None:
        """Add a later finding to the newest incident of an incarnation.

        Raises:
            OSError: it is kept only in memory.
        """
        for place in reversed(range(len(self._kept))):
            if self._kept[place].incarnation == incarnation:
                self._kept[place] = replace(self._kept[place], finding=finding)
                if self._file is not None:
                    self._rewrite(self._file)
                return

    def _rewrite(self, file: Path) -> None:
        half = file.with_suffix(".half")
        half.write_bytes(b"".join(_encode(kept) + b"\n" for kept in self._kept))
        half.replace(file)
        self._written = len(self._kept)


def incident_document(incident: Incident) -> Mapping[str, object]:
    """Return an incident as it is shown and stored."""
    document: Mapping[str, object] = msgspec.to_builtins(incident)
    return document


def _read(file: Path | None) -> list[Incident]:
    if file is None or not file.is_file():
        return []
    read: list[Incident] = []
    for line in file.read_bytes().splitlines():
        try:
            read.append(_decode(line))
        except msgspec.MsgspecError:
            continue  # written by another version
    return read


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A worker at one moment; advisory."""

    id: WorkerId
    model: str
    engine: str
    state: WorkerState
    because: str
    next_at: datetime | None
    pid: int | None
    port: int
    incarnation: int
    slots_total: int
    slots_configured: int
    slots_in_use: int
    slots_because: str | None
    last_exit: EngineExit | None
    verdict: Verdict | None
    requests: tuple[RequestView, ...]
    tokens_per_s: float
    weight_version: int | None
    ignored: tuple[str, ...] = ()  # parameters that an attached server was found to ignore
    not_continued: str | None = None  # why its engine is not asked to go on with half an answer
