"""The thread that writes: what is committed together, and what waits for what."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest

from service.store.databases.sqlite import MemoryDatabase
from service.store.threads import Write
from service.store.writer import Writer
from tests.harness.waiting import LIMIT_S, wait_for


@pytest.fixture
def groups() -> list[int]:
    """The number of writes in each group."""
    return []


@pytest.fixture
def writer(groups: list[int]) -> Iterator[Writer]:
    """A writer whose accounts would wait for a minute."""
    with closing(MemoryDatabase()) as database:
        database.prepare()
        made = Writer(database, database.membership(), lambda: groups.append(0), lambda _: None, linger_s=60.0)
        made.start()
        with closing(made):
            yield made


def hand_in(writer: Writer, groups: list[int], *, may_wait: bool) -> "Future[None]":
    def note(_: object) -> None:
        groups[-1] += 1

    write = Write(operation=note, jobs=frozenset(), is_kept=True, may_wait=may_wait)
    writer.submit(write, lambda _: None)
    return write.future


def test_accounts_wait_for_the_next_urgent_write(writer: Writer, groups: list[int]) -> None:
    """They are committed with it, and alone would have waited."""
    accounts = [hand_in(writer, groups, may_wait=True) for _ in range(3)]
    wait_for(lambda: "waiting=0" in repr(writer), "the writer has taken all")
    assert not any(account.done() for account in accounts)
    hand_in(writer, groups, may_wait=False).result(LIMIT_S)
    assert all(account.result(LIMIT_S) is None for account in accounts)
    assert groups == [4]


def test_an_urgent_write_waits_for_nothing(writer: Writer, groups: list[int]) -> None:
    """Each is a group of its own."""
    for _ in range(3):
        hand_in(writer, groups, may_wait=False).result(LIMIT_S)
    assert groups == [1, 1, 1]


def test_the_end_of_the_writer_waits_for_no_group(writer: Writer, groups: list[int]) -> None:
    """What was handed in is written, and the thread ends."""
    account = hand_in(writer, groups, may_wait=True)
    closing_thread = threading.Thread(target=writer.close)
    closing_thread.start()
    assert account.result(LIMIT_S) is None
    closing_thread.join(LIMIT_S)
    assert not closing_thread.is_alive()
    assert groups == [1]
