"""The effective configuration as it may be shown: every secret in it masked, wherever it stands."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

MASK: Final = "********"
WHOLLY_SECRET: Final = frozenset({"api_keys", "headers", "secrets"})
# Of an environment nobody knows what is secret, but for these, whose values help to see what is wrong.
HARMLESS: Final = re.compile(
    r"(?:CUDA|HIP|ROCR|NVIDIA|OMP|MKL|OPENBLAS|GGML|LLAMA_ARG|VLLM|NCCL|GLOO|LC|XDG)_(?!.*(?:KEY|TOKEN|PASS|SECRET|AUTH))\w*"
    r"|PATH|HOME|LANG|TZ|USER|SHELL|TERM|TMPDIR|PWD|LD_LIBRARY_PATH|PYTHON\w*|MODE|DEBUG|LOG_LEVEL|THREADS"
)
_WORD: Final = r"[\w.-]*(?:key|token(?!s)|secret|pass(?!es)|passw|credential|auth|session|cookie|bearer)[\w.-]*"
_BEARER: Final = re.compile(r"(?P<head>\b(?:Bearer|Basic|Token)\s+)\S+", re.IGNORECASE)
_PLAIN: Final = re.compile(r"\d{1,4}|true|false|yes|no|on|off", re.IGNORECASE)
_HEADER_FLAGS: Final = frozenset({"-H", "--header", "--headers", "-u", "--user"})
_IN_URL: Final = re.compile(r"(?P<head>\w+://[^/\s:@]*:)[^\s@]*(?=@)")
_ASSIGNED: Final = re.compile(rf"(?P<head>(?:[?&]|--?|^){_WORD}=)[^&\s]*", re.IGNORECASE)


def masked(document: object, name: str = "") -> object:
    """Return a document of JSON with its secrets masked; ``name`` is the key under which it stands."""
    if name in WHOLLY_SECRET:
        return _wholly(document)
    if name == "env" and isinstance(document, Mapping):
        return {key: value if _is_harmless(str(key), str(value)) else MASK for key, value in document.items()}
    if isinstance(document, Mapping):
        return {key: masked(value, str(key)) for key, value in document.items()}
    if isinstance(document, list):
        return [
            MASK if before in _HEADER_FLAGS else masked(item, _flag(before))
            for before, item in pairwise([_flag(name), *document])
        ]
    if not isinstance(document, str):
        return document
    return MASK if re.search(_WORD, name, re.IGNORECASE) else mask_text(document)


def _is_harmless(name: str, value: str) -> bool:
    is_known = HARMLESS.fullmatch(name) is not None and mask_text(value) == value
    return is_known or (_PLAIN.fullmatch(value) is not None and not re.search(_WORD, name, re.IGNORECASE))


def mask_text(text: str) -> str:
    """Return a text without the passwords of its addresses, and without values that are assigned to secret names."""
    for secret in (_IN_URL, _BEARER, _ASSIGNED):
        text = secret.sub(rf"\g<head>{MASK}", text)
    return text


def _flag(word: object) -> str:
    """Return the flag whose value comes next in a command."""
    return word if isinstance(word, str) and word.startswith("-") and "=" not in word else ""


def _wholly(document: object) -> object:
    if isinstance(document, Mapping):
        return dict.fromkeys(document, MASK)
    return [MASK for _ in document] if isinstance(document, list) else MASK
