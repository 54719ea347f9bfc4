"""The terminal's display while jobs run in this process."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final, Protocol

import anyio
import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule

from service.api.routes.status import shown_status
from service.cli.displays.console import can_draw, part, plain
from service.cli.displays.pace import Pace, bar, pace_text
from service.cli.displays.status_table import (
    PIPE_WORDS,
    PROGRESS_BAR,
    SPEAKING,
    Document,
    changes,
    last_words,
    table,
    tokens_per_s,
    who,
)
from service.conversations.job.job import JobId, TurnKey, TurnKind
from service.conversations.job.states import ENDED_CONVERSATIONS, ENDED_TURNS, ConversationState
from service.node.jobs import JobView
from service.node.node import Node
from service.node.prompt_history import AskedPrompt
from service.node.status import speaking

TURN: Final = "turn"
READY: Final = "ready"  # an event with a reason means that the turn is ready again
PLAIN_INTERVAL_S: Final = 1.0  # least time between two lines where the output is not a terminal
WORDS_INTERVAL_S: Final = 5.0  # least time between two prints of last words there
REFRESH_HZ: Final = 4


class PromptDisplay:
    """Prints the prompts of turns as their attempts end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._read: dict[JobId, int] = {}  # number of each job's last read event
        self._printed: dict[TurnKey, int] = {}  # printed attempts of each turn

    async def show(self, node: Node, jobs: Iterable[JobId]) -> None:
        """Print the prompts since the last call."""
        for job_id in jobs:
            events, _ = await node.jobs.events_after(job_id, self._read.get(job_id, 0))
            for event in events:
                self._read[job_id] = event.number
                if event.kind == TURN:
                    await self._show_turn(node, job_id, json.loads(event.data))

    async def _show_turn(self, node: Node, job_id: JobId, event: dict[str, object]) -> None:
        key = TurnKey(job_id, str(event["conversation"]), str(event["agent"]), int(str(event["round"])))
        if event["state"] in (READY, "in_flight") and not event.get("reason"):
            return
        if event.get("kind") == TurnKind.SUMMARY:
            for prompt in await node.prompts.of_turn(key, TurnKind.SUMMARY):
                self._print(key, 1, prompt)
            return
        asked = await node.prompts.of_turn(key)
        begin = self._printed.get(key, 0)
        for number, prompt in enumerate(asked[begin:], begin + 1):
            self._print(key, number, prompt)
        self._printed[key] = max(begin, len(asked))

    def _print(self, key: TurnKey, number: int, prompt: AskedPrompt) -> None:
        place = f"{key.conversation_id}, {key.agent_id}, round {key.round}, attempt {number}"
        self._console.print(Rule(plain(place), align="left"))
        if prompt.messages is None:
            self._line("(unknown: the turn was inherited from a job that was deleted)")
            return
        for message in prompt.messages:
            self._line(f"[{message.role}]\n{plain(message.content)}")
            for call in message.calls:
                self._line(f"[call] {plain(call.name)} {plain(call.arguments)}")
        self._line(f"[params] {plain(json.dumps(prompt.params, ensure_ascii=False))}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Display(Protocol):
    """Shows the progress of jobs."""

    def show(self, views: Sequence[JobView], node: Node) -> None:
        """Show all jobs as they are now, with running and waiting turns."""

    def hold(self, *, is_held: bool) -> None:
        """Stop showing anything while a person is asked on the terminal."""


class _Table:
    """The live table, on a terminal."""

    def __init__(self, live: Live, *, words: bool) -> None:
        self._live = live
        self._words = words
        self._pace = Pace()
        self._is_held = False

    def hold(self, *, is_held: bool) -> None:
        if is_held != self._is_held:
            self._is_held = is_held
            (self._live.stop if is_held else self._live.start)()

    def show(self, views: Sequence[JobView], node: Node) -> None:
        if self._is_held:
            return
        self._pace.note(anyio.current_time(), sum(map(_ended, views)))
        status = msgspec.to_builtins(shown_status(node))
        above = [f"[green]{_bar(view)}[/] {escape(progress_line(view))}" for view in views]
        above.append(escape(_rates(views, self._pace, status)))
        said = _said(node) if self._words else None
        self._live.update(table(status, "\n".join(above), pace=self._pace, said=said))


class _Lines:
    """Plain lines for changes: each change of a worker, and the jobs' progress once a second at most."""

    def __init__(self, console: Console, *, words: bool) -> None:
        self._console = console
        self._words = words
        self._pace = Pace()
        self._before: Document | None = None
        self._last: dict[str, tuple[str, float]] = {}  # each job's last line, and when it was shown
        self._words_shown_at = 0.0
        self._is_held = False

    def hold(self, *, is_held: bool) -> None:
        self._is_held = is_held

    def show(self, views: Sequence[JobView], node: Node) -> None:
        if self._is_held:
            return
        now = anyio.current_time()
        self._pace.note(now, sum(map(_ended, views)))
        status = msgspec.to_builtins(shown_status(node))
        for line in changes(self._before, status) if self._before is not None else ():
            self._print(line)
        self._before = status
        for view in views:
            self._show(view, now, _rates(views, self._pace, status))
        if self._words and now - self._words_shown_at >= WORDS_INTERVAL_S:
            self._words_shown_at = now
            for turn in _said(node):
                self._print(f"  {who(turn)}: {last_words(turn, PIPE_WORDS)}")

    def _show(self, view: JobView, now: float, rates: str) -> None:
        line = progress_line(view)
        is_over = view.stored.finished_at is not None
        last, shown_at = self._last.get(view.stored.id, ("", 0.0))
        if line == last or (now - shown_at < PLAIN_INTERVAL_S and not is_over):
            return
        self._last[view.stored.id] = (line, now)
        self._print(line if is_over else f"{line} | {rates}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def display(console: Console, *, words: bool = False) -> Iterator[Display]:
    """Show progress for a block; the terminal and its cursor are restored afterwards, even after errors.

    ``words`` shows the last words of turns.
    """
    if not can_draw(console):
        yield _Lines(console, words=words)
        return
    with Live(console=console, refresh_per_second=REFRESH_HZ, transient=False) as live:
        yield _Table(live, words=words)


def progress_line(view: JobView) -> str:
    """Return a job's progress as plain text."""
    by_state = view.tally.conversations
    conversations = sum(by_state.get(state, 0) for state in ENDED_CONVERSATIONS)
    failed = by_state.get(ConversationState.FAILED, 0)
    return (
        f"{plain(view.stored.name)}: {_ended(view)}/{view.stored.total_turns} turns, "
        f"{conversations}/{view.stored.total_conversations} conversations, "
        + part("{} failed, ", failed)
        + f"{view.in_flight} in flight, {view.ready} ready"
        + part(", {} awaited", view.tally.awaited)
    )


def _rates(views: Sequence[JobView], pace: Pace, status: Document) -> str:
    left = sum(view.stored.total_turns - _ended(view) for view in views)
    return pace_text(pace, left, tokens_per_s(status))


def _ended(view: JobView) -> int:
    return sum(view.tally.turns.get(state, 0) for state in ENDED_TURNS)


def _bar(view: JobView) -> str:
    return bar(_ended(view), view.stored.total_turns, PROGRESS_BAR)


def _said(node: Node) -> list[Document]:
    return [asdict(turn) for turn in speaking(node.scheduler, SPEAKING)[0]]
