"""The dashboard's files, read once: their paths, media types and ETags.

The page has no build step: browsers get ``static`` as it is. ``vendor`` is third-party code as published.
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
    ".yaml": "application/yaml",  # example jobs
}
PREFIX: Final = "/web/"
FOLDERS: Final = {"static": PREFIX, "vendor": f"{PREFIX}vendor/", "gallery": f"{PREFIX}gallery/"}
INDEX: Final = "index.html"


class PageFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file; ``tag`` is its ``ETag``, a digest of the content."""

    content: bytes
    kind: str
    tag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files by URL path; the page itself is at ``/``."""
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
