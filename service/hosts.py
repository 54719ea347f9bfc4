"""Names of hosts in one spelling, so that what a caller writes and what an operator writes can be compared."""

import httpx


def canonical_host(host: str) -> str:
    """Return a host in small letters, without brackets, and with other alphabets in their ASCII form.

    Raises:
        ValueError: it is none.
    """
    bare = host.strip().removeprefix("[").removesuffix("]")
    try:
        url = httpx.URL(f"http://[{bare}]/" if ":" in bare else f"http://{bare}/")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{host!r} is no name of a host") from error
    found = url.raw_host.decode("ascii").lower()
    if not found or url.port is not None or url.raw_path != b"/" or url.userinfo or "*" in found:
        raise ValueError(f"{host!r} is no name of a host; it stands alone, with no scheme, port, path or asterisk")
    return found
