"""Hosts of webhooks in one spelling, so that callers' and operators' can be compared; and their signatures."""

import base64
import binascii
import hashlib
import hmac
from typing import Final
from urllib.parse import urlsplit

import httpx

PREFIX: Final = "whsec_"
PORTS: Final = {"http": 80, "https": 443}


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


def canonical_origin(origin: str) -> str:
    """Return an origin as browsers send it: in small letters, without the port that its scheme has by itself.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(origin)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{origin!r}: {error}") from error
    if parts.scheme not in PORTS or "@" in parts.netloc or origin.rstrip("/") != f"{parts.scheme}://{parts.netloc}":
        raise ValueError(f"{origin!r} is not an origin, as http://localhost:3000 is")
    host = canonical_host(parts.hostname or "")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + ("" if port in {None, PORTS[parts.scheme]} else f":{port}")


def canonical_host(host: str) -> str:
    """Return a host in small letters, without brackets, and with other alphabets in their ASCII form.

    Raises:
        ValueError: it is none.
    """
    bare = host.strip().removeprefix("[").removesuffix("]")
    try:
        url = httpx.URL(f"http://[{bare}]/" if ":" in bare else f"http://{bare}/")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{host!r} is not a host name") from error
    found = url.raw_host.decode("ascii").lower()
    if not found or url.port is not None or url.raw_path != b"/" or url.userinfo or "*" in found or " " in bare:
        raise ValueError(f"{host!r} is not a host name; it stands alone, with no scheme, port, path or asterisk")
    return found.removesuffix(".")
