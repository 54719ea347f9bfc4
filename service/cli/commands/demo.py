"""The demo: a service with its dashboard, a debate, an engine that is killed in the middle, and a tool call.

It is an ordinary service, and a client posts jobs to it and follows them.
"""

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Final

import anyio
import typer

from roundhouse_client import AsyncClient
from roundhouse_client.errors import RoundhouseError
from roundhouse_client.values.events import TurnChange
from roundhouse_client.values.transcripts import Turn
from roundhouse_client.values.workers import Worker
from service.cli.displays.console import part, plain
from service.config.source import LoadedConfig
from service.serve import page_address, serve
from workers.errors import StartFailed

KILL_AFTER: Final = 6  # turns that end, on the other engine, before the kill
TAIL: Final = 10  # shown log lines of an engine that could not be started
LINE: Final = 110  # shown characters of a turn's text
LOOK_S: Final = 0.1
READY_LIMIT_S: Final = 120.0  # time for the next engine to get ready
DONE: Final = "completed"
FAILED: Final = frozenset({"backoff", "failed"})


async def play(
    loaded: LoadedConfig, listener: socket.socket, jobs: Sequence[Mapping[str, object]], stays: bool
) -> bool:
    """Serve, run ``jobs`` one after the other, and stop; return whether all completed.

    An engine is killed during the first. With ``stays`` the service runs until a person stops it.

    Raises:
        StartFailed: an engine could not be started.
    """
    results: list[bool] = []
    failures: list[StartFailed] = []

    async def run() -> None:
        try:
            async with AsyncClient(page_address(listener)) as client:
                results.append(await _Demo(client).run(jobs))
        except StartFailed as error:
            failures.append(error)
        except RoundhouseError as error:  # it was stopped meanwhile
            typer.echo(f"the demo ends early: {error}", err=True)
        if stays and results:
            typer.echo(f"\nThe service runs at {page_address(listener)} until Ctrl-C; then its state is deleted.")
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await serve(loaded, lambda: loaded, listener)
        tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return results == [True]


class _Demo:
    """The printed side of the demo, one line per event."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._ended = 0

    async def run(self, jobs: Sequence[Mapping[str, object]]) -> bool:
        """Run the jobs, print their events, and return whether all completed."""
        await self._wait_started()
        typer.echo(f"Watch it in a browser: {self._client.url}\n")
        states = [await self._run_job(job, is_hurt=number == 0) for number, job in enumerate(jobs)]
        return states == [DONE] * len(states)

    async def _wait_started(self) -> None:
        """Return when all engines are ready; one that ends before that means a machine that can run none."""
        while True:
            workers = (await self._client.list_workers()).workers
            for worker in workers:
                if worker.state in FAILED:
                    log = await self._client.get_log(worker.id, tail=TAIL)
                    raise StartFailed(worker.id, worker.because, tuple(line.text for line in log.lines))
            if all(worker.state == "ready" for worker in workers):
                return
            await anyio.sleep(LOOK_S)

    async def _run_job(self, job: Mapping[str, object], *, is_hurt: bool) -> str:
        victim = (await self._client.list_workers()).workers[0] if is_hurt else None
        self._ended = 0
        again = 0
        with _stopped(victim):
            posted = await self._client.post_job(dict(job))
            async with anyio.create_task_group() as tasks, aclosing(self._client.follow_job(posted.id)) as events:
                async for event in events:
                    turn = event.value
                    if not isinstance(turn, TurnChange):
                        continue
                    if turn.state == "ready" and turn.reason is not None:
                        again += 1
                        _tell(f"{_who(turn)} runs again: {turn.reason}")
                    elif turn.state == DONE:
                        await self._tell_words(posted.id, turn)
                        self._ended += 1
                        if victim is not None and self._ended == KILL_AFTER:
                            tasks.start_soon(self._kill, victim)
        ended = await self._client.get_job(posted.id)
        typer.echo(f"{ended.name}: {ended.state}, {_turns(self._ended)}{part(', {} of them twice', again)}\n")
        return ended.state

    async def _tell_words(self, job_id: str, change: TurnChange) -> None:
        conversation = await self._client.get_conversation(job_id, change.conversation)
        key = (change.agent, change.round)
        turn = next((each for each in conversation.turns if (each.agent, each.round) == key), None)
        if turn is None:
            return
        for call in turn.tool_calls:
            text = f"calls {call['name']}({_short(call['arguments'])}) and gets {_short(call['result'])}"
            _tell(f"{_who(change)} {text}")
        _tell(f"{_who(change)}: {_short(_said(turn))}")

    async def _kill(self, victim: Worker) -> None:
        """Kill the stopped engine with its unfinished turns, and print the recovery."""
        worker = await self._client.get_worker(victim.id)
        if worker.pid is None or worker.pid != victim.pid:
            return  # on a slow machine the supervisor has replaced the stopped engine as hung
        began_at = anyio.current_time()
        turns = _turns(worker.slots.in_use)
        os.kill(worker.pid, signal.SIGKILL)
        _tell(f"*** {worker.id}: its engine is killed (SIGKILL to process {worker.pid}) with {turns} on it")
        with anyio.move_on_after(READY_LIMIT_S):
            while True:
                await anyio.sleep(LOOK_S)
                now = await self._client.get_worker(worker.id)
                if now.incarnation > worker.incarnation and now.state == "ready":
                    seconds = anyio.current_time() - began_at
                    _tell(f"*** {worker.id}: engine {now.incarnation} is ready, {seconds:.1f} s later")
                    return


@contextmanager
def _stopped(worker: Worker | None) -> Iterator[None]:
    """Keep a worker's engine from ending turns in the block: a small model's job would end before the kill."""
    if worker is None or worker.pid is None:
        yield
        return
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed
            os.kill(worker.pid, signal.SIGCONT)


def _tell(line: str) -> None:
    typer.echo(f"  {plain(line)}")


def _who(turn: TurnChange) -> str:
    return f"{turn.conversation}, round {turn.round}, {turn.agent}"


def _said(turn: Turn) -> str:
    return " ".join(turn.text.split())


def _turns(number: int) -> str:
    return f"{number} turn" if number == 1 else f"{number} turns"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LINE else f"{text[: LINE - 1]}…"
