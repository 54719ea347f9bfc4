"""A chat in the terminal, through a service's HTTP API and its queue for all requests."""

import json
import os
import readline
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from roundhouse_client import Client, Refused
from service.cli.commands.chat_session import Chat
from service.cli.commands.own_service import FoundService, FoundUrlOption, StartConfigOption, Wanted, open_service
from service.cli.connection import AnswerRefused, KeyOption
from service.cli.conventions import state_home
from service.cli.displays.console import WordWrap, part, plain
from service.errors import ConfigError
from transport.events import Event, ReasoningDelta, TextDelta

MOST_INPUT: Final = 4 * 1024 * 1024  # characters of a piped prompt
# States in which an engine takes no request.
DOWN: Final = ("starting", "backoff", "failed", "stopped", "stopping", "draining")
MOST_HISTORY: Final = 1000  # typed lines that are kept
HELP: Final = """\
/model [NAME]          show the models, or switch to another
/system [TEXT]         show the system text, or set it; /system - removes it
/set [NAME VALUE]      show the parameters, or set one, e.g. temperature 0.2; /set NAME - removes it
/again, /retry         drop the last answer and ask again
/clear                 forget the conversation
/help                  show this
/quit                  leave, as Ctrl-D does
A line that ends with \\ continues on the next. Ctrl-C ends an answer; its words so far stay."""


class ChatDisplay:
    """The terminal's side of a chat: typed lines, answers as they come, and the cost of each."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._console = Console(highlight=False, emoji=False)
        self._wrap = WordWrap(lambda: self._console.width)
        self._is_thinking = False
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/model": self._model,
            "/system": self._system,
            "/set": self._set,
            **dict.fromkeys(("/again", "/retry"), self._again),
            "/clear": self._clear,
            "/help": self._help,
        }

    def run(self) -> None:
        """Read and answer until the input ends."""
        while True:
            try:
                line = _typed()
            except KeyboardInterrupt:
                self._tell("Ctrl-D leaves, Ctrl-C ends an answer")
                continue
            except EOFError:
                typer.echo()
                return
            if line in {"/quit", "/exit", "/bye"}:
                return
            self._take(line)

    def answer(self, text: str) -> None:
        """Ask and show the answer."""
        self._is_thinking = False
        try:
            answer = self._chat.ask(text, self._show)
        finally:
            self._flush()
        typer.echo()
        self._tell(answer.cost)

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        try:
            if name in self._commands:
                self._commands[name](rest.strip())
            elif name.startswith("/") and "/" not in name[1:]:
                self._tell(f"{name}: no such command; /help shows them")
            elif line.strip():
                self.answer(line)
        except AnswerRefused as error:
            typer.echo(f"no answer: {plain(error)}", err=True)

    def _show(self, event: Event) -> None:
        is_thinking = isinstance(event, ReasoningDelta)
        if is_thinking != self._is_thinking:
            self._flush()
            typer.echo("" if is_thinking else "\n")
            self._is_thinking = is_thinking
        if isinstance(event, (TextDelta, ReasoningDelta)):
            self._print(self._wrap.break_lines(plain(event.text)) if self._console.is_terminal else plain(event.text))

    def _flush(self) -> None:
        """Show the last word, even if unfinished; the next text begins a line."""
        self._print(self._wrap.flush())

    def _print(self, text: str) -> None:
        style = "dim" if self._is_thinking else None
        self._console.print(text, end="", markup=False, soft_wrap=True, style=style)

    def _tell(self, text: str) -> None:
        if text:
            self._console.print(text, markup=False, soft_wrap=True, style="dim")

    def _model(self, name: str) -> None:
        if not name:
            for model in self._chat.models:
                room = part(", {} tokens", model.max_model_len)
                self._tell(f"{'*' if model == self._chat.model else ' '} {model.id}{room}")
            return
        found = next((model for model in self._chat.models if model.id == name), None)
        if found is None:
            self._tell(f"{name}: no such model; /model lists them")
        else:
            self._chat.model = found

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = "" if text == "-" else text
        else:
            self._tell(self._chat.system or "there is no system text")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            for key, held in self._chat.params.items():
                self._tell(f"{key} {json.dumps(held)}")
        elif value.strip() == "-":
            self._chat.params.pop(name, None)
        elif value:
            self._chat.params[name] = _value(value.strip())
        else:
            self._tell(f"{name}: {json.dumps(self._chat.params.get(name))}")

    def _again(self, _: str) -> None:
        question = self._chat.take_back()
        if question is None:
            self._tell("nothing was asked")
        else:
            self.answer(question)

    def _clear(self, _: str) -> None:
        self._chat.messages.clear()

    def _help(self, _: str) -> None:
        self._tell(HELP)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _typed() -> str:
    """Return the typed prompt; a line that ends with a backslash goes on in the next."""
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(". "))
    return "\n".join(lines)


def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="A model of the service, or one to start: a GGUF file, hf:ORG/REPO.", metavar="[MODEL]"),
    ] = None,
    url: FoundUrlOption = None,
    api_key: KeyOption = None,
    config: StartConfigOption = None,
    system: Annotated[str, typer.Option(help="The system text.")] = "",
) -> None:
    """Chat with a model of a running service, or of one that ends with the chat. Piped text is one question."""
    wanted = Wanted(url=url, api_key=api_key, config=config, model=model)
    piped = None if sys.stdin.isatty() else _piped()
    with open_service(wanted) as service:
        _tell_down(service)
        talk = Chat(service)
        talk.system = system
        try:
            display = ChatDisplay(talk)
            if piped is not None:
                display.answer(piped)
            else:
                _greet(service)
                with _History(state_home() / "chat_history"):
                    display.run()
        finally:
            talk.close()


def _piped() -> str:
    text = sys.stdin.read(MOST_INPUT + 1)
    if not text.strip():
        raise ConfigError("the piped text is empty, so nothing is asked")
    if len(text) > MOST_INPUT:  # a cut question would get an answer too
        raise ConfigError(f"the piped text is longer than {MOST_INPUT} characters")
    return text


def _tell_down(found: FoundService) -> None:
    """Say at once why a model's engines do not answer: a question would wait for them silently."""
    with Client(found.url, api_key=found.api_key, patience_s=0.0) as service, suppress(Refused):
        of_model = {found.model.id, found.model.root}  # an adapter runs on its base model's engines
        workers = [worker for worker in service.list_workers().workers if worker.model in of_model]
        if all(worker.state in DOWN for worker in workers):
            for worker in workers:
                typer.echo(plain(f"{worker.id} is {worker.state}: {worker.because}"), err=True)


def _greet(service: FoundService) -> None:
    whose = ", which ends with this chat" if service.is_own else ""
    typer.echo(f"{service.model.id} at {service.url}{whose}. /help shows the commands, Ctrl-D leaves.")


class _History:
    """Earlier prompts for the arrow keys, in a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        readline.set_history_length(MOST_HISTORY)
        with suppress(OSError):
            readline.read_history_file(self._path)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a chat works without a writable home
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._path)
            self._path.chmod(0o600)
