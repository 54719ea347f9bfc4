"""Large jobs reach the scheduler in pieces, in order, and are cancelled whole."""

from collections.abc import Coroutine
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId, Mode
from service.scheduling.admission import TURNS_AT_ONCE, Admission, Piece
from tests.harness.jobs import agent, job


class Stage:
    """Records what is admitted, and lets the store go on after each piece."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.go_on = anyio.Event()
        self.admission = Admission(self.pieces.append, self._settle, lambda what: self.tasks.append(what()))

    async def _settle(self) -> None:
        await self.go_on.wait()
        self.go_on = anyio.Event()

    def names(self) -> list[str]:
        return [talk.id for piece in self.pieces for talk in piece.job.conversations]


def big(name: str = "j", conversations: int = TURNS_AT_ONCE, agents: int = 2) -> Piece:
    made = job(*(agent(f"a{number}") for number in range(agents)), conversations=conversations, name=name)
    return Piece(job=made, ended=(), unfinished=(), is_cancelled=False)


async def test_a_small_job_is_admitted_whole_and_at_once() -> None:
    """A small job reaches the scheduler as the object that was handed in."""
    stage, small = Stage(), big(conversations=3)
    stage.admission.admit_piece(small)
    assert (stage.pieces, stage.tasks) == ([small], [])
    await stage.admission.wait_done()


async def test_a_large_job_follows_in_its_order() -> None:
    """No piece makes more turns ready than the limit, and the next piece waits for the store."""
    stage, whole = Stage(), big(conversations=TURNS_AT_ONCE + 1)
    later = replace(whole, job=replace(whole.job, conversations=big("j", 1).job.conversations))
    stage.admission.admit_piece(whole)
    stage.admission.admit_piece(later)  # the same job: it stands behind the rest of it
    async with anyio.create_task_group() as tasks:
        (rest,) = stage.tasks
        tasks.start_soon(lambda: rest)
        seen = 0
        while len(stage.names()) < TURNS_AT_ONCE + 2:
            await anyio.wait_all_tasks_blocked()
            assert len(stage.pieces) == seen + 1
            seen += 1
            stage.go_on.set()
    assert all(len(piece.job.conversations) * 2 <= TURNS_AT_ONCE for piece in stage.pieces)
    assert stage.names() == [talk.id for each in (whole, later) for talk in each.job.conversations]
    await stage.admission.wait_done()


@pytest.mark.parametrize("end", ["cancel", "clear"])
async def test_the_rest_of_a_job_that_ends_never_runs(end: str) -> None:
    """After a cancel the rest arrives as cancelled, so that its turns end.

    A job that moved to another node sends no more.
    """
    stage, whole = Stage(), big()
    stage.admission.admit_piece(whole)
    if end == "cancel":
        stage.admission.cancel(JobId("j"))
    else:
        stage.admission.clear()
    async with anyio.create_task_group() as tasks:
        (rest,) = stage.tasks
        tasks.start_soon(lambda: rest)
        await anyio.wait_all_tasks_blocked()
        stage.go_on.set()
    assert [piece.is_cancelled for piece in stage.pieces] == ([False, True] if end == "cancel" else [False])
    await stage.admission.wait_done()


async def test_in_free_mode_all_rounds_are_ready_at_once() -> None:
    """In free mode a piece therefore holds fewer conversations."""
    stage, whole = Stage(), big(conversations=10, agents=1)
    talks = tuple(replace(talk, rounds=500) for talk in whole.job.conversations)
    stage.admission.admit_piece(replace(whole, job=replace(whole.job, mode=Mode.FREE, conversations=talks)))
    assert len(stage.pieces[0].job.conversations) == 2
    for task in stage.tasks:
        task.close()
