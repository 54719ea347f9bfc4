"""Signatures of messages, as Standard Webhooks has them (standardwebhooks.com)."""

import base64
import binascii
import hashlib
import hmac
from typing import Final

PREFIX: Final = "whsec_"


def signing_key(secret: str) -> bytes:
    """Return the bytes of a secret: what follows ``whsec_`` is base64, any other is taken as it is.

    Raises:
        ValueError: it begins with ``whsec_`` and is no base64.
    """
    if not secret.startswith(PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("a secret that begins with whsec_ goes on in base64") from error


def sign(secret: str, message_id: str, at: str, body: bytes) -> str:
    """Return the signature of a message; ``at`` is its time in seconds since 1970."""
    signed = hmac.digest(signing_key(secret), f"{message_id}.{at}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(signed).decode()}"
