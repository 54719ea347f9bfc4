"""Databases that report each statement, for tests that count statements or ask for their plans."""

from collections.abc import Callable, Iterable, Sequence

from service.store.databases.database import Connection, Cursor, Database, Membership

Report = Callable[[Connection, str, Sequence[object]], None]  # with the connection that is about to run it


class ReportedConnection:
    """A ``Connection``; statements of many rows are reported once, without their parameters."""

    def __init__(self, real: Connection, report: Report) -> None:
        self._real = real
        self._report = report

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        self._report(self._real, sql, parameters)
        return self._real.execute(sql, parameters)

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        self._report(self._real, sql, ())
        self._real.execute_many(sql, rows)

    def begin(self) -> None:
        self._real.begin()

    def commit(self) -> None:
        self._real.commit()

    def rollback(self) -> None:
        self._real.rollback()

    def close(self) -> None:
        self._real.close()


class ReportedDatabase:
    """A ``Database`` of such connections."""

    def __init__(self, real: Database, report: Report) -> None:
        self.readers = real.readers
        self._real = real
        self._report = report

    def connect_writer(self) -> Connection:
        return ReportedConnection(self._real.connect_writer(), self._report)

    def connect_reader(self) -> Connection:
        return ReportedConnection(self._real.connect_reader(), self._report)

    def membership(self) -> Membership:
        return self._real.membership()

    def trouble_of(self, error: Exception) -> str | None:
        return self._real.trouble_of(error)

    def is_conflict(self, error: Exception) -> bool:
        return self._real.is_conflict(error)
