"""``roundhouse top``: a running service, live on a terminal, or as lines in a pipe."""

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from roundhouse_client import Client
from roundhouse_client.calls import node_calls
from roundhouse_client.flows.asking import PATIENCE_S
from service.cli.connection import JsonOption, KeyOption, UrlOption, connect
from service.cli.displays.console import can_draw
from service.cli.displays.pace import Pace
from service.cli.displays.status_table import (
    PIPE_WORDS,
    Document,
    changes,
    last_words,
    plain_lines,
    rates,
    summary,
    table,
    who,
)
from service.errors import ConfigError

HINT: Final = "w: latest words   q: leave"
WORDS_KEY, LEAVE_KEY = "w", "q"
INTERVAL_S: Final = 0.5
LINE_INTERVAL_S: Final = 1.0  # least time between two lines of progress
Wait = Callable[[float], str]  # waits for some seconds; returns the typed key, or ""


def top(
    *,
    interval: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between updates.", show_default="0.5")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    words: Annotated[bool, typer.Option("--words", help="Show the latest words of turns; also key w.")] = False,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show live what runs and what waits for what; plain lines if the output is not a terminal."""
    if once and interval is not None:
        raise ConfigError("--once shows the state once: leave out --interval")
    if as_json and words:
        raise ConfigError("--json prints the status, which does not include words: leave out --words")
    pause_s = INTERVAL_S if interval is None else interval
    console = Console(emoji=False)
    is_live = can_draw(console) and not (once or as_json)
    with connect(url, api_key) as service:
        if once or as_json:
            _look(service, console, pause_s, is_once=once, words=words, as_json=as_json)
        elif is_live:
            with _keys() as wait, Live(console=console, screen=True) as live:  # restores the cursor in any case
                _watch(service, live, wait, pause_s, words=words)
        else:
            _tell(service, pause_s, words=words)


def _look(service: Client, console: Console, interval: float, *, is_once: bool, words: bool, as_json: bool) -> None:
    """Print the status, once or, as JSON, repeatedly."""
    patience_s = 0.0
    while True:
        now = service.ask(node_calls.get_status(), patience_s=patience_s).document
        patience_s = PATIENCE_S
        if as_json:
            typer.echo(json.dumps(now))
        else:
            said = _said(service) if words else None
            if can_draw(console):
                console.print(table(now, pace=Pace(), said=said))
            else:
                typer.echo("\n".join(plain_lines(now, said or ())))
        if is_once:
            return
        time.sleep(interval)


def _watch(service: Client, live: Live, wait: Wait, interval: float, *, words: bool) -> None:
    """Redraw the table until the key for leaving is typed."""
    pace, patience_s = Pace(), 0.0
    while True:
        now = service.ask(node_calls.get_status(), patience_s=patience_s).document
        patience_s = PATIENCE_S
        said = _said(service) if words else None
        pace.note(time.monotonic(), now.get("ended_turns") or 0)
        live.update(table(now, pace=pace, said=said, hint=HINT), refresh=True)
        key = wait(interval)
        if key == LEAVE_KEY:
            return
        words = words is not (key == WORDS_KEY)


def _tell(service: Client, interval: float, *, words: bool) -> None:
    """Print the whole status once, then a line for each change, and progress once a second at most."""
    pace = Pace()
    before = service.ask(node_calls.get_status(), patience_s=0.0).document
    typer.echo("\n".join(plain_lines(before)))
    last, shown_at = "", time.monotonic()
    while True:
        time.sleep(interval)
        now = service.ask(node_calls.get_status(), patience_s=PATIENCE_S).document
        at = time.monotonic()
        pace.note(at, now.get("ended_turns") or 0)
        for line in changes(before, now):
            typer.echo(line)
        before = now
        line = f"{summary(now)} | {rates(now, pace)}"
        if line != last and at - shown_at >= LINE_INTERVAL_S:
            last, shown_at = line, at
            typer.echo(line)
            for turn in _said(service) if words else ():
                typer.echo(f"  {who(turn)}: {last_words(turn, PIPE_WORDS)}")


def _said(service: Client) -> list[Document]:
    return [turn.document for turn in service.ask(node_calls.get_speaking(), patience_s=PATIENCE_S).turns]


@contextmanager
def _keys() -> Iterator[Wait]:
    """Yield a function that waits for a key; for the block the terminal gives keys without Return."""
    stdin = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    if stdin is None or _is_behind(stdin):
        yield _sleep
        return
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)

    def wait(seconds: float) -> str:
        if not select.select([stdin], [], [], seconds)[0]:
            return ""
        typed = os.read(stdin, 1)
        if not typed:  # the terminal is gone
            return LEAVE_KEY
        return typed.decode(errors="replace")

    try:
        yield wait
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _is_behind(terminal: int) -> bool:
    """Whether this process is in the terminal's background: changing the terminal would stop it."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # not its controlling terminal: nothing stops it
        return False


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
