"""The base of all values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Something that Roundhouse answered; ``document`` is its JSON as it came, with fields of newer versions too.

    States and reasons are plain words: a newer service may have more of them.
    """

    document: Mapping[str, Any] = field(repr=False, compare=False)
