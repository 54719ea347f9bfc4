"""The demo: a service with its dashboard, a debate on it, an engine that is killed in the middle, and a call of a tool.

It is a service as any other, on which a client of its own posts jobs and follows them.
"""

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final

import anyio
import typer

from roundhouse_client import AsyncClient
from roundhouse_client.errors import RoundhouseError
from roundhouse_client.values.events import TurnChange
from roundhouse_client.values.transcripts import Turn
from roundhouse_client.values.workers import Worker
from service.cli.displays.console import plain
from service.config.source import LoadedConfig
from service.serve import page_address, serve
from workers.errors import StartFailed

KILL_AFTER: Final = 6  # turns that have ended
TAIL: Final = 10  # lines of an engine that could not be started
LINE: Final = 110  # characters of what a turn says
LOOK_S: Final = 0.1
SETTLE_S: Final = 0.2  # for the last words of an engine that was stopped
READY_LIMIT_S: Final = 120.0  # for the next engine
DONE: Final = "completed"
FAILED: Final = frozenset({"backoff", "failed"})


async def play(
    loaded: LoadedConfig, listener: socket.socket, jobs: Sequence[Mapping[str, object]], stays: bool
) -> bool:
    """Serve, run ``jobs`` one after the other, and stop; return whether all of them have completed.

    An engine is killed in the midst of the first. With ``stays`` the service runs until a person stops it.

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
            typer.echo(f"\nThe service goes on at {page_address(listener)} until Ctrl-C; then its state is deleted.")
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
    """The printed side of the demo, a line a thing."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._ended = 0

    async def run(self, jobs: Sequence[Mapping[str, object]]) -> bool:
        """Run the jobs, print what happens, and return whether all of them have completed."""
        await self._wait_started()
        typer.echo(f"Watch it in a browser: {self._client.url}\n")
        states = [await self._run_job(job, is_hurt=number == 0) for number, job in enumerate(jobs)]
        return states == [DONE] * len(states)

    async def _wait_started(self) -> None:
        """Return when all engines are ready; the first that ends before it is stands for a machine that runs none."""
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
        posted = await self._client.post_job(dict(job))
        self._ended = 0
        again = 0
        async with anyio.create_task_group() as tasks, aclosing(self._client.follow_job(posted.id)) as events:
            if is_hurt:
                tasks.start_soon(self._kill, posted.id)
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
        ended = await self._client.get_job(posted.id)
        twice = f", {again} of them twice" if again else ""
        typer.echo(f"{ended.name}: {ended.state}, {_turns(self._ended)}{twice}\n")
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

    async def _kill(self, job_id: str) -> None:
        """Kill an engine in the midst of the job, with a turn on it, and tell what comes of it."""
        while (job := await self._client.get_job(job_id)).progress.turns.completed < KILL_AFTER:
            if job.has_ended:
                return
            await anyio.sleep(LOOK_S)
        victim = await self._kill_busy(job_id)
        if victim is None:
            return
        began_at = anyio.current_time()
        turns = _turns(victim.slots.in_use)
        _tell(f"*** {victim.id}: its engine is killed (SIGKILL to process {victim.pid}) with {turns} on it")
        with anyio.move_on_after(READY_LIMIT_S):
            while True:
                await anyio.sleep(LOOK_S)
                now = await self._client.get_worker(victim.id)
                if now.incarnation > victim.incarnation and now.state == "ready":
                    seconds = anyio.current_time() - began_at
                    _tell(f"*** {victim.id}: engine {now.incarnation} is ready, {seconds:.1f} s later")
                    return

    async def _kill_busy(self, job_id: str) -> Worker | None:
        """Kill the engine with the most turns on it and return its worker; None where the job ends before.

        It is stopped first, and killed with a turn on it that cannot end: one of a small model may end before a
        signal is there.
        """
        workers = (await self._client.list_workers()).workers
        victim = max(workers, key=lambda worker: worker.slots.in_use)
        if victim.pid is None:
            return None
        os.kill(victim.pid, signal.SIGSTOP)
        fate = signal.SIGCONT
        try:
            await anyio.sleep(SETTLE_S)
            while not (victim := await self._client.get_worker(victim.id)).slots.in_use:
                if (await self._client.get_job(job_id)).has_ended:
                    return None
                await anyio.sleep(LOOK_S)
            fate = signal.SIGKILL
        finally:
            if victim.pid is not None:
                with suppress(ProcessLookupError):  # its worker has ended it meanwhile
                    os.kill(victim.pid, fate)
        return victim


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
