"""The one thread that writes: whatever waits when it turns up is committed together.

A commit with synchronous=FULL costs one fsync whether it holds one write or a hundred, so grouping is what makes it
affordable; nobody waits for a group to fill.
"""

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from service.errors import ServiceError, StoreError

MAX_GROUP: Final = 256  # a bound on how long the first of a group waits for the last
T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], Any]
logger = logging.getLogger(__name__)


class Writer:
    """Runs operations one after another on its own connection; each is atomic, and durable when its future is done."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], on_failure: Callable[[StoreError], None]) -> None:
        self._connect = connect
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[tuple[Operation, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer")
        self._is_closed = False
        self._failure: StoreError | None = None

    def __repr__(self) -> str:
        """State how much waits."""
        return f"<Writer waiting={self._queue.qsize()} closed={self._is_closed}>"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, operation: Callable[[sqlite3.Connection], T]) -> "Future[T]":
        """Hand in an operation; it runs after all that were handed in before."""
        future: Future[T] = Future()
        if self._is_closed:
            future.set_exception(StoreError("the store is closed"))
        else:
            self._queue.put((operation, future))
        return future

    def close(self) -> None:
        """Write what was handed in, then end the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        connection = self._connect()
        try:
            while group := self._next_group():
                self._write(connection, group)
        finally:
            connection.close()

    def _next_group(self) -> list[tuple[Operation, Future[Any]]]:
        """Return what waits, at least one; an empty list is the end."""
        group: list[tuple[Operation, Future[Any]]] = []
        item = self._queue.get()
        while item is not None:
            group.append(item)
            if len(group) == MAX_GROUP or self._queue.empty():
                return group
            item = self._queue.get()
        if group:
            self._queue.put(None)  # the end comes again after this group
        return group

    def _write(self, connection: sqlite3.Connection, group: list[tuple[Operation, Future[Any]]]) -> None:
        if self._failure is not None:
            # What follows a lost write may build on it: a job that is completed without one of its turns.
            for _, future in group:
                future.set_exception(self._failure)
            return
        done: list[tuple[Future[Any], Any]] = []
        refused: list[tuple[Future[Any], ServiceError]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for operation, future in group:
                connection.execute("SAVEPOINT operation")
                try:
                    done.append((future, operation(connection)))
                except ServiceError as error:  # an answer, not a failure: only this operation is undone
                    connection.execute("ROLLBACK TO operation")
                    refused.append((future, error))
                connection.execute("RELEASE operation")
            connection.execute("COMMIT")
        except Exception as error:
            logger.exception("store: a group of %d writes failed", len(group))
            if connection.in_transaction:
                connection.rollback()
            failure = self._failure = StoreError(f"cannot write: {error}")
            failure.__cause__ = error
            for _, future in group:
                future.set_exception(failure)
            self._on_failure(failure)
            return
        for future, result in done:
            future.set_result(result)
        for future, answer in refused:
            future.set_exception(answer)
