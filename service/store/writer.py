"""The one thread that writes; all pending writes are committed together.

A commit with synchronous=FULL costs one fsync for one write or a hundred, so grouping makes it affordable. No write
waits for a group to fill except usage, whose writers do not wait for it. Each group has a number that is committed with
it. If a connection breaks during a commit, the number shows whether the group is stored, so nothing is written twice.

A database in trouble (a full disk, a restarting server) is tried again until it works. Facts are held meanwhile, in
order; requests are refused and can be repeated. A write that can never be stored fails alone: it is written again with
care, and only if that fails does the store fail.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final

from service.errors import ServiceError, StoreError, StoreUnavailable
from service.store.databases.database import Connection, Database, Fenced, Membership
from service.store.news import ClaimsLost, StoreRecovered, StoreTroubled, WriterEvent, WritesFailed
from service.store.threads import Answer, Spoiled, Write, answer, refuse, without
from workers.policy.restart import Backoff

MAX_GROUP: Final = 256  # writes per group: bounds how long the first waits for the last
MAX_FACTS: Final = 2000  # facts per group, as far as they are known beforehand
LINGER_S: Final = 0.05  # seconds that usage waits for other writes: a commit for each took a quarter of a request's CPU
CONFLICTS: Final = 10  # conflicts in a row that count as trouble
PAUSES: Final = Backoff(first_s=0.1, last_s=2.0)
CLOSING_TRIES: Final = 2  # tries of a database in trouble before a close drops the remaining writes
logger = logging.getLogger(__name__)


class Writer:
    """Runs operations one after another on its own connection; each is durable when its future is done.

    An operation that raises a ServiceError has written nothing; the error is its result, not a failure. ``begin`` is
    called in each transaction before its operations. ``tell`` gets events about the database. Both run in the writer's
    thread and must not wait.
    """

    def __init__(
        self,
        database: Database,
        membership: Membership,
        begin: Callable[[], None],
        tell: Callable[[WriterEvent], None],
        linger_s: float = LINGER_S,
    ) -> None:
        self._database = database
        self._linger_s = linger_s
        self._membership = membership
        self._begin = begin
        self._tell = tell
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer")
        self._closing = threading.Event()
        self._connection: Connection | None = None
        self._is_enrolled = False
        self._number = 0
        self._unsure: list[Answer] | None = None  # a group whose commit has not been answered
        self._failure: StoreError | None = None
        self.trouble: str | None = None

    def __repr__(self) -> str:
        return f"<Writer waiting={self._queue.qsize()} trouble={self.trouble}>"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, write: Write, on_done: "Callable[[Future[Any]], None]") -> None:
        """Submit a write, to run after all earlier ones; ``on_done`` is called before the next group."""
        write.future.add_done_callback(on_done)
        if self._closing.is_set():
            write.future.set_exception(StoreError("the store is closed"))
        elif self.trouble is not None and not write.is_kept:
            write.future.set_exception(StoreUnavailable(self.trouble))
        else:
            self._queue.put(write)

    def close(self) -> None:
        """Write what was submitted, then end the thread."""
        if not self._closing.is_set():
            self._closing.set()
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            while group := self._next_group():
                self._write(group)
        finally:
            self._disconnect()

    def _next_group(self) -> list[Write]:
        """Return the next group of writes, at least one; an empty list is the end."""
        group: list[Write] = []
        item, facts = self._first() if self._membership.has_others else self._queue.get(), 0
        until = time.monotonic() + self._linger_s
        while item is not None:
            group.append(item)
            facts += item.size
            if len(group) == MAX_GROUP or facts >= MAX_FACTS:
                return group
            if not item.may_wait:
                until = 0.0
            try:
                left = until - time.monotonic()
                item = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
            except queue.Empty:
                return group
        if group:
            self._queue.put(None)  # the end is read again after this group
        return group

    def _first(self) -> Write | None:
        """Return the next write, None at the end, and notify the other nodes of earlier ones while it waits."""
        while True:
            with suppress(queue.Empty):
                return self._queue.get(timeout=self._notify())

    def _notify(self) -> float | None:
        """Send the notices that are due; return the seconds until others are, None without any."""
        if self._connection is None:
            return None
        try:
            return self._membership.send_notices(self._connection)
        except Exception as error:  # noqa: BLE001 - the next group finds what is wrong, and others look by themselves
            logger.warning("store: other nodes were not notified: %s", error)
            return None

    def _write(self, group: list[Write]) -> None:
        """Write a group, however long the database is in trouble."""
        tries = conflicts = 0
        while self._failure is None:
            try:
                answers = self._commit(group)
            except Fenced:
                self._is_enrolled = False
                logger.warning("store: another node has taken over what this one ran; its late results are refused")
                self._tell(ClaimsLost())
                group = refuse(group, StoreUnavailable("this node was taken for dead"), kept=True)
            except Spoiled as spoiled:  # only this write fails; the others are written without it
                logger.exception("store: a write cannot be")
                group = without(group, spoiled)
            except Exception as error:  # noqa: BLE001 - the database knows which errors pass; others end the writer
                if conflicts < CONFLICTS and self._database.is_conflict(error):
                    conflicts += 1
                    self._closing.wait(random.uniform(0, PAUSES.first_s))  # noqa: S311 - the other one goes first
                    continue
                trouble = self._database.trouble_of(error)
                self._disconnect()
                if trouble is None or (self._closing.is_set() and tries >= CLOSING_TRIES):
                    self._fail(error)
                    break
                self._note_trouble(trouble)
                group = refuse(group, StoreUnavailable(trouble), kept=False)
                tries += 1
                self._closing.wait(PAUSES.after(tries))
            else:
                self._note_trouble(None)
                answer(answers)
                return
        assert self._failure is not None  # noqa: S101 - the only other way out
        for write in group:
            write.future.set_exception(self._failure)

    def _commit(self, group: list[Write]) -> list[Answer]:
        """Write a group once; return the results of its operations."""
        if self._connection is None:
            self._connection = self._database.connect_writer()
        connection, answers = self._connection, self._unsure
        if answers is not None:
            connection.begin()
            is_there = self._membership.has_group(connection, self._number + 1)
            connection.rollback()
            self._unsure = None  # only now, since the connection may break during the query
            if is_there:
                self._number += 1
                return answers
        if not self._is_enrolled:  # in a transaction of its own: others cannot wait for a row that is not committed
            with _transaction(connection):
                self._membership.register(connection)
            self._is_enrolled = True
        with _transaction(connection):
            jobs = sorted({job for write in group for job in write.jobs})
            keys = [write.key for write in group if write.key is not None]
            only_claims = bool(group) and all(write.is_claim for write in group)
            self._membership.begin_group(connection, self._number + 1, jobs, keys, only_claims=only_claims)
            self._begin()
            answers = [(write, self._run_one(write, connection)) for write in group]
            self._membership.extend_lease(connection)
            self._unsure = answers
        self._unsure = None
        self._number += 1
        return answers

    def _run_one(self, write: Write, connection: Connection) -> Any:  # noqa: ANN401 - the operation's result
        try:
            return write.operation(connection)
        except ServiceError as error:
            return error
        except Exception as error:
            is_last = write.is_kept and write.careful is None
            if is_last or self._database.trouble_of(error) is not None or self._database.is_conflict(error):
                raise
            raise Spoiled(write, error) from error

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble is None and self.trouble is not None:
            logger.info("store: it is well again")
        elif trouble is not None and self.trouble is None:
            logger.error("store: %s; no new jobs are taken, and what has happened is kept until it is well", trouble)
        if trouble != self.trouble:
            self.trouble = trouble
            self._tell(StoreRecovered() if trouble is None else StoreTroubled(outage=trouble))

    def _fail(self, error: Exception) -> None:
        # Facts after a lost write may build on it: a job that is completed without one of its turns.
        logger.error("store: a group of writes failed", exc_info=error)
        self._failure = StoreError(f"cannot write: {error}")
        self._failure.__cause__ = error
        self._tell(WritesFailed(error=self._failure))

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it is dropped in any case
                connection.close()


@contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    connection.begin()
    try:
        yield
        connection.commit()
    except BaseException:
        with suppress(Exception):  # a broken connection has rolled back; the first error counts
            connection.rollback()
        raise
