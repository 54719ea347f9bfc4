"""Draws a run of ``roundhouse demo`` as a moving picture, in which its lines appear as they came.

    .venv/bin/python tools/record_demo.py docs/pictures/demo.svg

The picture needs no script: each line has an animation that begins at its time. Long pauses are shortened.
It begins with its last state, which also shows where animations do not run.
"""

import html
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Final

ROUNDHOUSE: Final = str(Path(sys.executable).parent / "roundhouse")
LINES: Final = 22  # visible lines of the scrolling picture
COLUMNS: Final = 108
WIDTH, LINE_HEIGHT, MARGIN = 860, 19, 16
MOST_PAUSE_S: Final = 1.5  # longest pause in the picture
FRAME_S: Final = 0.1
FIRST_S: Final = 2.0  # time that the last state shows before the start
LAST_S: Final = 6.0  # time that it shows at the end
STYLE: Final = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d8dee9;white-space:pre}"
    ".k{fill:#ff8f87;font-weight:bold}.r{fill:#9ece6a;font-weight:bold}.t{fill:#7f8ea3}"
)


def main() -> None:
    """Run the demo and write the picture."""
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = _run()
    target.write_text(_picture(lines))
    print(f"{target}: {len(lines)} lines, {lines[-1][0]:.1f} s, {target.stat().st_size} bytes")


def _run() -> list[tuple[float, str]]:
    """Return each line of a run with its time in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        began_at = time.monotonic()
        process = subprocess.Popen([ROUNDHOUSE, "demo"], stdout=subprocess.PIPE, text=True, cwd=folder)
        output = process.stdout or ()
        lines = [(time.monotonic() - began_at, line.rstrip("\n")) for line in output]
        if process.wait() != 0:
            sys.exit("the demo has failed")
    return lines


def _picture(lines: list[tuple[float, str]]) -> str:
    """Return the picture: all lines on one sheet that scrolls up as they come."""
    shown = [FIRST_S]
    for (before, _), (at, _) in pairwise(lines):
        shown.append(shown[-1] + min(at - before, MOST_PAUSE_S))
    whole = shown[-1] + LAST_S
    height = LINES * LINE_HEIGHT + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + (number + 1) * LINE_HEIGHT}" class="{_kind(text)}">'
        f'{html.escape(_cut(text))}<animate attributeName="opacity" values="1;0;1;1"'
        f' keyTimes="0;{_part(FIRST_S - FRAME_S, whole)};{_part(at, whole)};1"'
        f' calcMode="discrete" dur="{whole:.1f}s" repeatCount="indefinite"/></text>'
        for number, (at, (_, text)) in enumerate(zip(shown, lines, strict=True))
    ]
    last = -max(0, len(lines) - LINES) * LINE_HEIGHT
    moves = [(0.0, last), (FIRST_S - FRAME_S, 0)]
    moves += [(at, -(number + 1 - LINES) * LINE_HEIGHT) for number, at in enumerate(shown) if number >= LINES]
    scroll = (
        f'<animateTransform attributeName="transform" type="translate" calcMode="discrete" dur="{whole:.1f}s"'
        f' repeatCount="indefinite" values="{";".join(f"0 {y}" for _, y in moves)}"'
        f' keyTimes="{";".join(_part(at, whole) for at, _ in moves)}"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' aria-label="roundhouse demo: an engine is killed, and the debates end anyway">'
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" rx="8" fill="#1b2130"/>'
        f'<clipPath id="c"><rect width="{WIDTH}" height="{height - MARGIN // 2}"/></clipPath>'
        f'<g clip-path="url(#c)"><g transform="translate(0 {last})">{scroll}'
        + "".join(f"\n{row}" for row in rows)
        + "</g></g></svg>\n"
    )


def _part(at: float, whole: float) -> str:
    return f"{at / whole:.4f}"


def _kind(text: str) -> str:
    """Return the class of a line: a kill, a recovery, or a turn."""
    if "killed" in text:
        return "k"
    if "runs again" in text or "***" in text or "completed" in text:
        return "r"
    return "t" if text.startswith("  ") else ""


def _cut(text: str) -> str:
    return text if len(text) <= COLUMNS else f"{text[: COLUMNS - 1]}…"


if __name__ == "__main__":
    main()
