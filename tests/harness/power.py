"""A disk that forgets unsynced writes when the power fails: SQLite's files behind a VFS of apsw."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import apsw

from service.store.databases.database import Row
from service.store.databases.membership_exclusive import ExclusiveMembership
from service.store.databases.migrations import migrate, migrations_of
from service.store.databases.sqlite import WRITER_PRAGMAS

NAME = "forgetful"
SHARED = ("-shm",)  # memory, not a file, as far as durability goes


class Disk(apsw.VFS):
    """Counts writes; at write ``fails_at`` the power fails, and ``left`` is what a reboot would find."""

    def __init__(self, fails_at: int, chance: Random) -> None:
        self.files: dict[str, _File] = {}
        self.fails_at = fails_at
        self.writes = 0
        self.left: dict[str, bytes] | None = None
        self.chance = chance
        super().__init__(NAME, base="")

    def xOpen(self, name: Any, flags: list[int]) -> "_File":  # noqa: ANN401, N802 - apsw's words
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self.files.pop(Path(filename).name, None)

    def count_write(self) -> None:
        self.writes += 1
        if self.writes == self.fails_at:
            self.left = {name: file.after_power_loss(self.chance) for name, file in self.files.items()}


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:  # noqa: ANN401
        super().__init__("", name, flags)
        self._disk = disk
        filename = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        path = Path(filename)
        self._durable = bytearray(path.read_bytes() if path.exists() else b"")
        self._pending: list[tuple[int, bytes | None]] = []  # (offset, bytes), or (size, None) of a truncation
        if filename and not filename.endswith(SHARED):
            known = disk.files.get(path.name)
            if known is not None:
                self._durable, self._pending = known._durable, known._pending
            disk.files[path.name] = self

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: ANN401, N802
        super().xWrite(data, offset)
        self._pending.append((offset, bytes(data)))
        self._disk.count_write()

    def xTruncate(self, size: int) -> None:  # noqa: N802
        super().xTruncate(size)
        self._pending.append((size, None))

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        for change in self._pending:
            _apply(self._durable, change)
        self._pending.clear()

    def after_power_loss(self, chance: Random) -> bytes:
        """Return what is left: all synced writes and some of the rest, the last of them torn."""
        image = bytearray(self._durable)
        kept = self._pending[: chance.randrange(len(self._pending) + 1)]
        for number, (offset, data) in enumerate(kept):
            is_torn = number == len(kept) - 1 and data is not None and chance.random() < 0.5
            _apply(image, (offset, data[: chance.randrange(len(data) + 1)] if is_torn and data else data))
        return bytes(image)


def _apply(image: bytearray, change: tuple[int, bytes | None]) -> None:
    offset, data = change
    if data is None:
        del image[offset:]
        return
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


class _Cursor:
    def __init__(self, rows: list[Row], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def fetchone(self) -> Row | None:
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Row]:
        rows, self._rows = self._rows, []
        return rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.fetchall())


class ForgetfulConnection:
    """A ``service.store.databases.database.Connection`` on that disk."""

    def __init__(self, path: Path, synchronous: str) -> None:
        self._raw = apsw.Connection(str(path), vfs=NAME)
        self._raw.execute("PRAGMA locking_mode=EXCLUSIVE")  # the VFS knows no shared memory
        for pragma in WRITER_PRAGMAS:
            name = pragma.partition("=")[0]
            self._raw.execute(f"PRAGMA {name}={synchronous}" if name == "synchronous" else f"PRAGMA {pragma}")
        self._raw.execute("PRAGMA wal_autocheckpoint=50")

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> _Cursor:
        rows: list[Row] = list(self._raw.execute(sql, parameters))
        return _Cursor(rows, self._raw.changes())

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        self._raw.executemany(sql, rows)

    def execute_script(self, sql: str) -> None:
        self._raw.execute(sql)

    def begin(self) -> None:
        self._raw.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def close(self) -> None:
        self._raw.close()


class ForgetfulDatabase:
    """A ``service.store.databases.database.Database`` on that disk; it is read only after it is restored."""

    readers = 1

    def __init__(self, path: Path, synchronous: str = "FULL") -> None:
        self._path = path
        self._synchronous = synchronous

    def connect_writer(self) -> ForgetfulConnection:
        return ForgetfulConnection(self._path, self._synchronous)

    def connect_reader(self) -> ForgetfulConnection:
        raise AssertionError("nobody reads before the disk is restored")

    def membership(self) -> ExclusiveMembership:
        return ExclusiveMembership()

    def trouble_of(self, _error: Exception) -> None:
        return None

    def is_conflict(self, _error: Exception) -> bool:
        return False

    def prepare(self) -> None:
        connection = self.connect_writer()
        migrate(connection, migrations_of("sqlite"), connection.execute_script)
        connection.close()
