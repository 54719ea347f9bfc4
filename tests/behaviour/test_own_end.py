"""What a crash of the service itself costs, over several runs (specification, "Recovery after a crash")."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.config.schema import Config
from service.conversations.job.job import JobId
from service.errors import StoreError
from service.node.node import Node, open_node
from service.scheduling.recovery import MOST_SERVICE_ENDS
from tests.harness.waiting import wait_until
from workers.spec import EngineKind, WorkerSpec

LIMIT_S = 20.0
JOB = {
    "name": "t",
    "agents": [{"id": "a", "model": "m", "role": "r"}],
    "conversations": [{"id": "bad", "prompt": "hold"}, {"id": "good", "prompt": "say"}],
}


class Engine:
    """Holds requests as the test wants, and answers all others."""

    def __init__(self) -> None:
        self.held = 0
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        except asyncio.IncompleteReadError:  # its client has only looked whether it is there
            writer.close()
            return
        size = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
        body = await reader.readexactly(size)
        if b'"hold' in body or b"hold" in body:
            self.held += 1
            await reader.read()
        elif head.startswith(b"post"):
            self._write(writer, "text/event-stream", f"data: {CHUNK}\n\ndata: [DONE]\n\n")
        else:
            self._write(writer, "application/json", '{"data": [{"id": "m"}]}')
        writer.close()

    @staticmethod
    def _write(writer: asyncio.StreamWriter, kind: str, body: str) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


CHUNK = json.dumps({"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]})


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    async with await asyncio.start_server(made.answer, "127.0.0.1", 0) as server:
        made.port = server.sockets[0].getsockname()[1]
        yield made


@asynccontextmanager
async def life(engine: Engine, folder: Path) -> AsyncIterator[Node]:
    url = f"http://127.0.0.1:{engine.port}"
    config = Config.model_validate({"models": {"m": {"engine": "attached", "url": url}}})
    spec = WorkerSpec(engine=EngineKind.ATTACHED, name="m", url=url, slots=2)
    async with open_node(config, [spec], folder) as node:
        yield node


async def until_held(engine: Engine, count: int) -> None:
    await wait_until(lambda: engine.held >= count, "it holds the turn")


async def end_by(error: Exception, engine: Engine, folder: Path, count: int, job_id: JobId | None) -> JobId:
    """Run the service once, with the turn at work, until it ends in this way."""
    with pytest.raises(ExceptionGroup):
        async with life(engine, folder) as node:
            if job_id is None:
                job_id = (await node.door.post(JOB, None))[0].id
            else:
                await node.intake.claim_jobs(job_id)
            await until_held(engine, count)
            raise error
    assert job_id is not None
    return job_id


async def ended(engine: Engine, folder: Path, job_id: JobId) -> dict[str, str | None]:
    """Return why each conversation ended, in a run of the service that ends well."""
    async with life(engine, folder) as node:
        await node.intake.claim_jobs(job_id)
        await node.jobs.wait_ended(job_id, LIMIT_S)
        transcripts = [await node.jobs.transcript(job_id, name) for name in ("bad", "good")]
        await node.shut_down(0.0, asyncio.Event())  # type: ignore[arg-type]
    return {str(each["id"]): each["reason"] for each in transcripts}  # type: ignore[misc]


async def test_a_turn_at_work_at_three_crashes_of_the_service_is_set_aside(engine: Engine, tmp_path: Path) -> None:
    """As a turn that kills engines is.

    Otherwise each start would run it again, on one node of a cluster after another.
    """
    job_id: JobId | None = None
    for number in range(MOST_SERVICE_ENDS):
        job_id = await end_by(RuntimeError("a defect"), engine, tmp_path, number + 1, job_id)
    assert job_id is not None
    assert await ended(engine, tmp_path, job_id) == {"bad": "poisoned", "good": None}
    assert engine.held == MOST_SERVICE_ENDS


@pytest.mark.parametrize("error", [OSError("the disk has gone"), StoreError("the database is not ours any more")])
async def test_an_end_by_the_machine_or_the_store_charges_no_turn(
    engine: Engine, tmp_path: Path, error: Exception
) -> None:
    """The turn was at work every time, and caused none of the ends."""
    job_id: JobId | None = None
    for number in range(MOST_SERVICE_ENDS + 1):
        job_id = await end_by(error, engine, tmp_path, number + 1, job_id)
