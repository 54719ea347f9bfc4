"""Hosts of webhooks in one spelling, so that callers' and operators' compare equal; and webhook signatures."""

import base64
import binascii
import hashlib
import hmac
import re
from typing import Final
from urllib.parse import urlsplit

import httpx

PREFIX: Final = "whsec_"
PORTS: Final = {"http": 80, "https": 443}
SCHEMES_OF_PROGRAMS: Final = frozenset({
    "chrome-extension", "moz-extension", "safari-web-extension", "app", "capacitor", "ionic", "tauri", "vscode-webview",
})  # fmt: skip
_PROGRAM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # an extension's id, or a program's name


def signing_key(secret: str) -> bytes:
    """Return the bytes of a secret: base64 after ``whsec_``, any other secret as it is.

    Raises:
        ValueError: it begins with ``whsec_`` and is not base64.
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
    """Return an origin as browsers send it: lower case, without the default port.

    Browser extensions and programs that show pages have origins with their own schemes and without a port.

    Raises:
        ValueError: it is not an origin.
    """
    parts = urlsplit(origin)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{origin!r}: {error}") from error
    scheme, bare = parts.scheme, origin.rstrip("/").partition("://")[2]
    if scheme in SCHEMES_OF_PROGRAMS and _PROGRAM.fullmatch(bare):
        return f"{scheme}://{bare.lower()}"
    if scheme not in PORTS or "@" in parts.netloc or bare != parts.netloc:
        raise ValueError(f"{origin!r} is not an origin, as http://localhost:3000 and chrome-extension://ID are")
    host = canonical_host(parts.hostname or "")
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}" + ("" if port in {None, PORTS[scheme]} else f":{port}")


def canonical_host(host: str) -> str:
    """Return a host in lower case, without brackets, and with other alphabets in their ASCII form.

    Raises:
        ValueError: it is not a host name.
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
