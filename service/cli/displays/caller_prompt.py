"""Callers' turns from the terminal or from a pipe: a line is a turn."""

import os
import queue
import sys
import threading
from collections.abc import Container, Sequence
from typing import Final

from rich.console import Console

from service.cli.displays.console import plain
from service.cli.displays.run_display import Display
from service.conversations.job.job import JobId, TurnKey
from service.errors import ConfigError, InvalidWords, NotAwaited
from service.node.jobs import JobView
from service.node.node import Node
from service.store.awaited_turns import OpenTurn, Which

READ_BYTES: Final = 4096
MOST_LINE: Final = 1024 * 1024
LINES_AHEAD: Final = 16  # lines of a pipe that may be read ahead


class CallerPrompt:
    """Asks for one turn at a time, the oldest first, and shows what its agent may hear.

    Nothing else is shown meanwhile. A line for a turn that no longer waits for a caller is dropped.
    """

    def __init__(self, console: Console, shown: Display) -> None:
        self._console = console
        self._shown = shown
        self._asked: OpenTurn | None = None
        self._utterances_shown: dict[tuple[JobId, str, str], int] = {}  # by conversation and agent
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_AHEAD)
        self._is_read = False
        self._is_over = False

    def __repr__(self) -> str:
        return f"<CallerPrompt for {self._asked}>"

    async def look(self, node: Node, views: Sequence[JobView]) -> None:
        """Ask for an awaited turn, and speak the line that was read; this never blocks on a person.

        Raises:
            ConfigError: the input is at its end, and only turns that wait for a caller are left.
        """
        if not any(view.tally.awaited for view in views):
            self._drop_question("spoken otherwise")
            return
        listed = [turn for view in views for turn in await node.callers.listed(Which(job_id=view.stored.id), 0, 100)]
        self._drop_question("awaited no more", unless={turn.key for turn in listed})
        if self._asked is None and listed and not self._is_over:
            await self._ask(node, listed[0])
        if self._asked is not None:
            await self._take_line(node, self._asked.key)
        if self._is_over and not any(view.ready + view.in_flight for view in views):
            _refuse_endless(listed)

    async def _ask(self, node: Node, turn: OpenTurn) -> None:
        self._shown.hold(is_held=True)
        key = turn.key
        prompt, heard = await node.prompts.heard(key)
        place = (key.job_id, key.conversation_id, key.agent_id)
        if place not in self._utterances_shown:
            self._print(f"[{key.conversation_id}] {prompt}")
        for utterance in heard[self._utterances_shown.get(place, 0) :]:
            words = "has left" if utterance.text is None else utterance.text
            if words.strip() and utterance.agent != key.agent_id:
                self._print(f"{utterance.agent}: {words}")
        self._utterances_shown[place] = len(heard)
        self._console.print(f"{key.agent_id}, in {key.conversation_id}: ", end="", markup=False, highlight=False)
        self._asked = turn
        if not self._is_read:
            self._is_read = True
            threading.Thread(target=_read_lines, args=(self._lines,), name="words", daemon=True).start()

    async def _take_line(self, node: Node, key: TurnKey) -> None:
        try:
            line = self._lines.get_nowait()
        except queue.Empty:
            return
        self._asked = None
        self._shown.hold(is_held=False)
        if line is None:
            self._is_over = True
            self._print("")
            return
        if not sys.stdin.isatty():  # a terminal has shown it
            self._print(line)
        try:
            await node.callers.say(key, line)
        except (InvalidWords, NotAwaited) as error:
            self._print(str(error))

    def _drop_question(self, why: str, unless: Container[TurnKey] = ()) -> None:
        if self._asked is not None and self._asked.key not in unless:
            self._print(f"\n({self._asked.key.agent_id} is {why})")
            self._asked = None
            self._shown.hold(is_held=False)

    def _print(self, text: str) -> None:
        self._console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def _refuse_endless(turns: Sequence[OpenTurn]) -> None:
    endless = next((turn.key for turn in turns if turn.until is None), None)
    if endless is not None:
        text = f"{endless.agent_id} has a turn in {endless.conversation_id}, but standard input has ended"
        raise ConfigError(f"{text}; run the same command again to continue")


def _read_lines(lines: "queue.Queue[str | None]") -> None:
    """Read standard input to its end, without Python's buffers, whose locks a daemon must not hold at exit."""
    rest = b""
    try:
        while chunk := os.read(sys.stdin.fileno(), READ_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                lines.put(line.decode(errors="replace").rstrip("\r"))
            if len(rest) > MOST_LINE:
                break
    except (OSError, ValueError):  # it is closed
        pass
    if rest:
        lines.put(rest.decode(errors="replace"))
    lines.put(None)
