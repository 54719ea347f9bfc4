"""The files of the dashboard, read once: which there are, of which kind, and how a browser knows that one has changed.

The page has no build step: what is in ``static`` is what browsers get. ``vendor`` is others' work, as they publish it.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

import msgspec

KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".yaml": "application/yaml",  # jobs to begin with
}
PREFIX: Final = "/web/"
FOLDERS: Final = {"static": PREFIX, "vendor": f"{PREFIX}vendor/", "gallery": f"{PREFIX}gallery/"}
INDEX: Final = "index.html"


class PageFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file; ``tag`` is another one where the content is another (an ``ETag``)."""

    content: bytes
    kind: str
    tag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files by the paths that browsers ask for; the page itself is at ``/``."""
    found = {}
    for folder, prefix in FOLDERS.items():
        for entry in resources.files("service.web").joinpath(folder).iterdir():
            kind = KINDS.get("." + entry.name.rpartition(".")[2])
            if kind is not None:
                content = entry.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
                path = "/" if entry.name == INDEX else prefix + entry.name
                found[path] = PageFile(content=content, kind=kind, tag=tag)
    return MappingProxyType(found)
