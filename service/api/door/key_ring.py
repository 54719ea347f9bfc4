"""Which caller a key belongs to, found in a time that tells nothing of any key."""

import hashlib
import hmac
from collections.abc import Mapping

from service.conversations.callers import ANYBODY, Caller


class KeyRing:
    """The callers by the SHA-256 digests of their keys; without any key everybody who gets here is ``ANYBODY``."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self._callers = dict(callers)

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._callers)}>"

    def __len__(self) -> int:
        """Count the keys."""
        return len(self._callers)

    def find(self, authorization: str) -> Caller | None:
        """Return who brings a header ``Authorization: Bearer KEY``; None where no key is that one.

        Every digest is compared in constant time, whichever fits: so the time is the same for all keys and for none.
        """
        if not self._callers:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found: Caller | None = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(digest, known):
                found = caller
        return found if scheme.lower() == "bearer" else None
