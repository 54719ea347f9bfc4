"""The terminal's abilities, and the look of a transcript there."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

# What commands a terminal, or turns the direction of what follows (Unicode, "Explicit Directional Formatting").
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: object) -> str:
    """Return a text with each control but line feeds and tabs made visible, those of direction too."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text))


def can_draw(console: Console) -> bool:
    """Whether a display can be drawn anew in its place: on a terminal, and none that only takes lines."""
    return console.is_terminal and not console.is_dumb_terminal


def print_transcript(console: Console, name: str, transcript: Mapping[str, object]) -> None:
    """Print one conversation, turn by turn."""
    reason = f" ({transcript['reason']})" if transcript.get("reason") else ""
    place, state = f"{name}, conversation {transcript['id']}", f"{transcript['state']}{reason}"
    console.print(f"\n[bold]{escape(plain(place))}[/]: {escape(plain(state))}")
    turns = transcript["turns"]
    for turn in turns if isinstance(turns, Sequence) else ():
        known = [str(turn[key]) for key in ("state", "reason", "worker") if turn.get(key)]
        if turn.get("kind", "turn") != "turn":
            known.append(turn["kind"])
        if turn.get("inherited"):
            known.append("inherited of {job}/{conversation}".format(**turn["inherited"]))
        details = ", ".join(known)
        speaker = f"[round {turn['round']}] {turn['agent']}"
        console.print(f"\n[cyan]{escape(plain(speaker))}[/] ({escape(plain(details))})")
        if turn.get("detail"):
            console.print(f"  {plain(turn['detail'])}", markup=False, highlight=False, soft_wrap=True, style="red")
        console.print(plain(turn["text"]), markup=False, highlight=False, soft_wrap=True)
