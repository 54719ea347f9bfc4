"""A timeline as one HTML file: data, script and style in it, and a policy that lets nothing else run or be loaded."""

import base64
import hashlib
import html
from collections.abc import Iterator
from typing import Final

from service.timeline.timeline import Timeline, pieces

START: Final = """
const data = JSON.parse(document.getElementById("data").textContent);
drawTimeline(document.getElementById("timeline"), data);
"""
PAGE_STYLE: Final = (
    ":root{color-scheme:light dark}body{margin:0;padding:1rem;background:light-dark(#fff,#12171e)}"
    "h1{font:600 1.1rem system-ui,sans-serif;margin:0 0 .5rem}"
)


def page_pieces(timeline: Timeline, script: str, style: str) -> Iterator[bytes]:
    """Yield the file in pieces; ``script`` is a module that declares ``drawTimeline``, ``style`` its style sheet."""
    code, look = script + START, style + PAGE_STYLE
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(look)}; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(f"{timeline.name}: timeline")
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{look}</style>\n</head>\n<body>\n"
        f'<main>\n<h1>{title}</h1>\n<div id="timeline"></div>\n</main>\n<script type="application/json" id="data">'
    ).encode()
    for piece in pieces(timeline):
        yield piece.replace(b"<", b"\\u003c")  # in JSON it stands in texts alone: no word ends the element
    yield f'</script>\n<script type="module">{code}</script>\n</body>\n</html>\n'.encode()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
