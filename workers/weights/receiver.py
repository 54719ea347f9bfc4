"""Answers of the extension in an engine (``extension/roundhouse_weights.py``), from calls or from a file.

Reading the file costs an engine nothing, so a waiting caller reads; only commands are calls.
"""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from transport.control import EngineControl
from transport.errors import MalformedFrame
from workers.spec import WorkerId


class ReceiverState(Struct, frozen=True):
    """The state of one process of an engine: its group, and its progress with an update."""

    key: str = ""
    group: str = "none"
    stage: str = "idle"
    update: int = 0
    received: int = 0
    total: int = 0
    error: str | None = None


class ReceiverFiles:
    """The files in which the processes of a model's engines write their progress."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"<ReceiverFiles {self._folder}>"

    def clear(self, worker: WorkerId) -> str:
        """Delete an earlier engine's files; return the prefix of the present one's."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.glob(f"{quote(worker, safe='')}.*"):
            file.unlink(missing_ok=True)
        return str(self._folder / quote(worker, safe=""))

    def read(self, worker: WorkerId, size: int) -> list[ReceiverState]:
        """Return the state of each of an engine's ``size`` processes; one without a file is in no group."""
        states = (self._read(self._folder / f"{quote(worker, safe='')}.{number}") for number in range(size))
        return list(states)

    def _read(self, file: Path) -> ReceiverState:
        try:
            return msgspec.json.decode(file.read_bytes(), type=ReceiverState)
        except FileNotFoundError:
            return ReceiverState()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MalformedFrame(f"{file}: {error}") from error


async def ask(control: EngineControl, what: str, arguments: Mapping[str, object] | None = None) -> list[ReceiverState]:
    """Call the extension in every process of an engine; return each one's state.

    Raises:
        EngineError: one of them failed.
    """
    answers = await control.call_workers(f"roundhouse_{what}", arguments or {})
    try:
        return [msgspec.json.decode(str(result), type=ReceiverState) for result in answers]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"the weights' extension answered {answers!r}") from error
