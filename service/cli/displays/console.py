"""The terminal's abilities, and the look of a transcript there."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from service.conversations.record.findings import told_of

# Terminal control codes, and marks that change the text's direction (Unicode, "Explicit Directional Formatting").
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

GLUE: Final = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"
TAB: Final = 8


def plain(text: object) -> str:
    """Return a text with control and direction characters made visible, except for line feeds and tabs."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text))


def part(form: str, value: object) -> str:
    """Return a part of a line with a value in it; "" where there is no value, or it is 0."""
    return form.format(value) if value else ""


def can_draw(console: Console) -> bool:
    """Whether a display can be redrawn in place: on a terminal that takes more than lines."""
    return console.is_terminal and not console.is_dumb_terminal


class WordWrap:
    """Breaks text that comes in pieces between its words, at the present width of a terminal in columns."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""  # an unfinished word

    def __repr__(self) -> str:
        return f"<WordWrap at column {self._column}>"

    def break_lines(self, text: str) -> str:
        """Return the new text up to its last whole word."""
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """Return the last word; the next text begins a line."""
        word, self._column = self._taken(), 0
        return word

    def _take(self, char: str) -> str:
        if char == "\n":
            word, self._column = self._taken(), 0
            return f"{word}\n"
        if char.isspace() and char not in GLUE:
            word = self._taken()
            space = " " * (TAB - self._column % TAB) if char == "\t" else char
            fits = self._column + len(space) < self._width()
            self._column += len(space) if fits else 0
            return word + space if fits else word
        self._word += char
        # In a script without spaces a word may be as long as the text.
        is_whole = cell_len(char) > 1 or cell_len(self._word) >= self._width() - 1
        return self._taken() if is_whole else ""

    def _taken(self) -> str:
        word, self._word = self._word, ""
        cells = cell_len(word)
        breaks = self._column > 0 and self._column + cells >= self._width()
        self._column = cells if breaks else self._column + cells
        return f"\n{word}" if breaks else word


def given_up_line(given_up: Mapping[str, Any]) -> str:
    """Return the sentence for a pattern or a schema that ran out of time too often; ``given_up`` is a job's entry."""
    path, turn = given_up["path"], "{agent} in round {round} of {conversation}".format(**given_up["since"])
    return plain(f"{path}: ran out of time too often; not tried from {turn} on")


def _ended_in_words(ended_by: object, left: object) -> str:
    """Return how a conversation ended before its rounds were over, and the agents that left it."""
    ending = ""
    if isinstance(ended_by, Mapping) and ended_by.get("leader"):
        ending = f", ended by {ended_by['leader']} in round {ended_by['round']}"
    elif isinstance(ended_by, Mapping):
        by = part(" ({})", ended_by.get("agent"))
        ending = f", ended by until[{ended_by['until']}]{by} in round {ended_by['round']}"
    return ending + (f"; left: {', '.join(map(str, left))}" if isinstance(left, Sequence) and left else "")


def print_transcript(console: Console, name: str, transcript: Mapping[str, object]) -> None:
    """Print one conversation, turn by turn."""
    reason = part(" ({})", transcript.get("reason"))
    place = f"{name}, conversation {transcript['id']}"
    state = f"{transcript['state']}{reason}{_ended_in_words(transcript.get('ended_by'), transcript.get('left'))}"
    console.print(f"\n[bold]{escape(plain(place))}[/]: {escape(plain(state))}")
    turns = transcript["turns"]
    for turn in turns if isinstance(turns, Sequence) else ():
        known = [str(turn[key]) for key in ("state", "reason", "worker") if turn.get(key)]
        if turn.get("kind", "turn") != "turn":
            known.append(turn["kind"])
        if turn.get("inherited"):
            known.append("inherited from {job}/{conversation}".format(**turn["inherited"]))
        details = ", ".join(known)
        speaker = f"[round {turn['round']}] {turn['agent']}"
        console.print(f"\n[cyan]{escape(plain(speaker))}[/] ({escape(plain(details))})")
        for said, style in ((turn.get("detail"), "red"), (told_of(turn.get("findings")), "yellow")):
            if said:
                console.print(f"  {plain(said)}", markup=False, highlight=False, soft_wrap=True, style=style)
        console.print(plain(turn["text"]), markup=False, highlight=False, soft_wrap=True)
