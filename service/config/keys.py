"""The named keys of the HTTP API: as operators write them, and the caller that each stands for.

From here on a key is known by its SHA-256; the key itself is not kept.

Source: specification, "Keys".
"""

import hashlib
import logging
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from service.conversations.callers import API_KEYS, USUAL_SCOPES, Caller, KeyScope
from service.errors import ConfigError
from service.formats.documents import parse_document, read_text
from service.formats.faults import Rules, StrictModel, path_of, phrase, rules

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
KeyName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")]
WRITABLE, READABLE = stat.S_IWGRP | stat.S_IWOTH, stat.S_IROTH
logger = logging.getLogger(__name__)


def usable_key(key: str) -> str:
    """Return a key that a client can send.

    Raises:
        ValueError: none can.
    """
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ValueError("a key must be printable ASCII without spaces: otherwise no client can send it")
    return key


SentKey = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(usable_key)]


class KeyGrant(StrictModel):
    """The name of a key, and what its holder may do and take."""

    name: KeyName
    scopes: Annotated[list[KeyScope], Field(min_length=1)] = Field(default=list(USUAL_SCOPES))
    share: float = Field(default=1.0, gt=0, le=1e6)
    max_priority: int = 0
    requests_per_s: float | None = Field(default=None, gt=0, le=1e6)
    queued: int | None = Field(default=None, ge=1)

    @property
    def caller(self) -> Caller:
        """Its holder."""
        return Caller(
            name=self.name,
            scopes=frozenset(self.scopes),
            share=self.share,
            max_priority=self.max_priority,
            requests_per_s=self.requests_per_s,
            queued=self.queued,
        )


class HashedKey(KeyGrant):
    """A key of a file: known by its SHA-256 alone."""

    sha256: Digest

    @property
    def digest(self) -> str:
        """The digest that the key is known by."""
        return self.sha256


class KeyConfig(KeyGrant):
    """A key of the configuration: itself, or its SHA-256."""

    key: SentKey | None = None
    sha256: Digest | None = None

    @rules
    def _is_one_of_both(self) -> Rules:
        yield (self.key is None) == (self.sha256 is None), "give either key: TEXT or sha256: HEX"

    @property
    def digest(self) -> str:
        """The digest that the key is known by."""
        return digest_of(self.key) if self.key is not None else str(self.sha256)


NamedKey = HashedKey | KeyConfig
_FILE: Final = TypeAdapter(list[HashedKey])


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key in lower-case hexadecimal digits; keys are known by it."""
    return hashlib.sha256(key.encode()).hexdigest()


def named_key(name: str, digest: str, scopes: Iterable[KeyScope]) -> HashedKey:
    """Return a new entry of a key.

    Raises:
        ConfigError: no key can have that name.
    """
    try:
        return HashedKey(name=name, sha256=digest, scopes=list(scopes))
    except ValidationError as error:
        raise ConfigError(f"{name!r}: {phrase(error.errors()[0])}") from None


def repeated(keys: Iterable[NamedKey], api_keys: Sequence[str]) -> str | None:
    """Return which name or key appears twice, without the key itself; None where none does."""
    names, owners = {API_KEYS}, {digest_of(key): API_KEYS for key in api_keys}
    for key in keys:
        if key.name in names:
            return f"the name {key.name} appears twice" if key.name != API_KEYS else f"the name {API_KEYS} is reserved"
        if key.digest in owners:
            return f"{key.name} is the same key as {owners[key.digest]}"
        names.add(key.name)
        owners[key.digest] = key.name
    return None


def callers_of(api_keys: Sequence[str], keys: Sequence[NamedKey], file: Path | None) -> dict[bytes, Caller]:
    """Return the caller of each key, including the keys of ``file``, by the key's digest.

    Raises:
        ConfigError: the file cannot be used, or a name or a key appears twice.
    """
    everyone = (*keys, *(read_keys(file) if file is not None else ()))
    fault = repeated(everyone, api_keys)
    if fault is not None:
        raise ConfigError(f"{file}: {fault}")
    of_all_scopes = Caller(name=API_KEYS, scopes=frozenset(KeyScope))
    by_digest = {digest_of(key): of_all_scopes for key in api_keys}
    by_digest |= {key.digest: key.caller for key in everyone}
    return {bytes.fromhex(digest): caller for digest, caller in by_digest.items()}


def read_keys(file: Path) -> list[HashedKey]:
    """Return the keys of a file of hashes.

    Raises:
        ConfigError: it cannot be read, others may write it, or it holds anything but keys by their hashes.
    """
    text = read_text(file)
    _check_mode(file)
    document, _ = parse_document(text, str(file))
    try:
        keys = _FILE.validate_python(document)
    except ValidationError as error:  # inputs are left out: one may be a key
        places = [f"{path_of(each['loc']) or 'the file'}: {phrase(each)}" for each in error.errors(include_input=False)]
        raise ConfigError("\n".join(f"{file}: {place}" for place in places)) from None
    if not keys:
        raise ConfigError(f"{file} holds no key")
    return keys


def _check_mode(file: Path) -> None:
    """Refuse a file that others may write: they could add a key of their own."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & WRITABLE:
        raise ConfigError(f"{file}: users other than its owner may write it ({mode:04o}); chmod 600 {file}")
    if mode & READABLE:
        logger.warning("%s: every user may read it (%04o), and may try to guess the hashed keys", file, mode)
