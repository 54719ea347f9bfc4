"""Masking of every secret in the effective configuration, so that it may be shown."""

import os
import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Final

OURS: Final = ("ROUNDHOUSE_", "NOTIFY_SOCKET", "WATCHDOG_")
MASK: Final = "********"
WHOLLY_SECRET: Final = frozenset({"api_keys", "headers", "secrets", "sha256"})
# Any variable of an environment may be secret, except for these, whose values help to find faults.
HARMLESS: Final = re.compile(
    r"(?:CUDA|HIP|ROCR|NVIDIA|OMP|MKL|OPENBLAS|GGML|LLAMA_ARG|VLLM|NCCL|GLOO|LC|XDG)_(?!.*(?:KEY|TOKEN|PASS|PWD|SECRET|AUTH|CREDENTIAL|COOKIE))\w*"
    r"|PATH|HOME|LANG|TZ|USER|SHELL|TERM|TMPDIR|PWD|LD_LIBRARY_PATH|PYTHON\w*|MODE|DEBUG|LOG_LEVEL|THREADS"
)
# A secret's name ends in one of these, or has it as a word: tokenizer, author and keyboard do not.
_ENDING: Final = (
    r"(?:key|token|secret|pass|password|passwd|passphrase|pwd|credentials?|auth|authorization|session|cookie|bearer"
    r"|sig|signature)"
)
_NAME: Final = rf"[\w.-]*{_ENDING}(?:[_.-][\w.-]*)?"
_BEARER: Final = re.compile(r"(?P<head>\b(?:Bearer|Basic|Token)\s+)\S+", re.IGNORECASE)
_PLAIN: Final = re.compile(r"\d{1,4}|true|false|yes|no|on|off", re.IGNORECASE)
_HEADER_FLAGS: Final = frozenset({"-H", "--header", "--headers", "-u", "--user"})
_IN_URL: Final = re.compile(r"(?P<head>\w[\w+.-]*://(?:[^/\s:@]*:)?)[^/\s]+(?=@)")
_ASSIGNED: Final = re.compile(rf"(?P<head>(?<![\w.-]){_NAME}(?:=|:\s*))[^&\s'\"]+", re.IGNORECASE)
_AFTER_FLAG: Final = re.compile(rf"(?P<head>(?<![\w.-])--?{_NAME}\s+)[^\s'\"]+", re.IGNORECASE)
_SECRET_NAME: Final = re.compile(rf"-*{_NAME}", re.IGNORECASE)


def child_environment(named: Collection[str]) -> dict[str, str]:
    """Return a child's environment, without our own variables and those that the configuration reads (``named``).

    Those are mostly keys, passwords and addresses that hold one. A child that needs one has it in its own ``env``.
    Paths and device settings stay, even if the configuration reads them.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OURS) and (name not in named or HARMLESS.fullmatch(name))
    }


def masked(document: object, name: str = "") -> object:
    """Return a JSON document with its secrets masked; ``name`` is its key in the document around it."""
    if name in WHOLLY_SECRET and document is not None:
        return _wholly(document)
    if isinstance(document, Mapping):
        is_environment = name == "env"
        return {
            key: _masked_variable(str(key), value) if is_environment else masked(value, str(key))
            for key, value in document.items()
        }
    if isinstance(document, list):
        return _masked_list(document, name)
    if document is None or isinstance(document, bool):
        return document
    if _SECRET_NAME.fullmatch(name):
        return MASK
    return mask_text(document) if isinstance(document, str) else document


def _masked_variable(name: str, value: object) -> object:
    return value if _is_harmless(name, str(value)) else MASK


def _masked_list(items: list[object], name: str) -> object:
    if _SECRET_NAME.fullmatch(name):
        return _wholly(items)
    return [
        MASK if isinstance(before, str) and before in _HEADER_FLAGS else masked(item, _flag(before))
        for before, item in pairwise(["", *items])
    ]


def _is_harmless(name: str, value: str) -> bool:
    is_known = HARMLESS.fullmatch(name) is not None and mask_text(value) == value
    return is_known or (_PLAIN.fullmatch(value) is not None and not _SECRET_NAME.fullmatch(name))


def mask_text(text: str) -> str:
    """Return a text without passwords in its addresses and without values assigned to secret names."""
    for secret in (_IN_URL, _BEARER, _ASSIGNED, _AFTER_FLAG):
        text = secret.sub(rf"\g<head>{MASK}", text)
    return text


def _flag(word: object) -> str:
    """Return the flag whose value comes next in a command; "" where the word is none."""
    return word if isinstance(word, str) and word.startswith("-") and "=" not in word else ""


def _wholly(document: object) -> object:
    if isinstance(document, Mapping):
        return dict.fromkeys(document, MASK)
    return [MASK for _ in document] if isinstance(document, list) else MASK
