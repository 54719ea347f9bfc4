"""Names of hosts in one spelling, so that what a caller writes and what an operator writes can be compared."""

from typing import Final
from urllib.parse import urlsplit

import httpx

PORTS: Final = {"http": 80, "https": 443}


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
