"""The effective configuration as it may be shown: every secret in it masked, wherever it stands."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

MASK: Final = "********"
WHOLLY_SECRET: Final = frozenset({"api_keys", "headers", "secrets"})
_WORD: Final = r"[\w.-]*(?:key|token(?!s)|secret|password|credential)[\w.-]*"
_IN_URL: Final = re.compile(r"(?P<head>\w+://[^/\s:@]*:)[^\s@]*(?=@)")
_ASSIGNED: Final = re.compile(rf"(?P<head>(?:[?&]|--?|^){_WORD}=)[^&\s]*", re.IGNORECASE)


def masked(document: object, name: str = "") -> object:
    """Return a document of JSON with its secrets masked; ``name`` is the key under which it stands."""
    if name in WHOLLY_SECRET:
        return _wholly(document)
    if isinstance(document, Mapping):
        return {key: masked(value, str(key)) for key, value in document.items()}
    if isinstance(document, list):
        return [masked(item, _flag(before)) for before, item in pairwise(["", *document])]
    if not isinstance(document, str):
        return document
    return MASK if re.search(_WORD, name, re.IGNORECASE) else mask_text(document)


def mask_text(text: str) -> str:
    """Return a text without the passwords of its addresses, and without values that are assigned to secret names."""
    return _ASSIGNED.sub(rf"\g<head>{MASK}", _IN_URL.sub(rf"\g<head>{MASK}", text))


def _flag(word: object) -> str:
    """Return the flag whose value comes next in a command."""
    return word if isinstance(word, str) and word.startswith("-") and "=" not in word else ""


def _wholly(document: object) -> object:
    if isinstance(document, Mapping):
        return dict.fromkeys(document, MASK)
    return [MASK for _ in document] if isinstance(document, list) else MASK
