"""The address of an engine, and the headers of every request to it."""

import re
import ssl
from collections.abc import Mapping
from typing import Final, Self
from urllib.parse import urlsplit

import msgspec

V1: Final = "v1"
_SURFACE: Final = re.compile(r"/(?:chat/completions|completions|embeddings|models|responses|messages)\Z")
_VERSIONED: Final = re.compile(r"/(?P<version>v\d+\w*)\Z")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of one engine: a host and a port, or a UNIX socket.

    ``base_path`` precedes every path, without a trailing slash; ``query`` follows it, without a question mark.
    ``version`` replaces ``v1`` in paths that begin with it. ``headers`` are sent with every request.
    """

    host: str = "127.0.0.1"
    port: int = 80
    uds: str | None = None
    base_path: str = ""
    query: str = ""
    version: str = V1
    is_tls: bool = False
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of_url(cls, url: str, headers: Mapping[str, str] | None = None) -> Self:
        """Return the endpoint of an attached server; ``/v1`` at the end of its URL may be left out.

        Another version at the end stays; the path of an API surface behind it is cut off.

        Raises:
            ValueError: not an http or https URL of a host.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username:
            shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without the password
            raise ValueError(f"{shown!r} is not an http:// or https:// URL of a host; a key goes into headers")
        if parts.fragment:
            raise ValueError(f"#{parts.fragment} is sent to no server: leave it out")
        is_tls = parts.scheme == "https"
        path = _SURFACE.sub("", parts.path.rstrip("/"))
        versioned = _VERSIONED.search(path)
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            base_path=path if versioned is None else path[: versioned.start()],
            version=V1 if versioned is None else versioned["version"],
            query=parts.query,
            is_tls=is_tls,
            headers=headers or {},
        )

    @property
    def authority(self) -> str:
        """The text of the Host header."""
        if self.uds is not None:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The part of the URL before every path."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.base_path}"

    def path_of(self, path: str) -> str:
        """Return this server's path for a path of OpenAI's API, below ``base_path``."""
        is_other = self.version != V1 and path.startswith(f"/{V1}/")
        return f"/{self.version}{path.removeprefix(f'/{V1}')}" if is_other else path

    def head(self, path: str, accept: str = "text/event-stream", connection: str = "close") -> bytes:
        """Return the head of a POST up to the value of its Content-Length; ``accept`` is the media type asked for."""
        lines = {
            "Host": self.authority,
            "Content-Type": "application/json",
            "Accept": accept,
            "Accept-Encoding": "identity",
            "Connection": connection,
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        path = f"{self.base_path}{self.path_of(path)}"
        asked = f"{path}?{self.query}" if self.query else path
        return f"POST {asked} HTTP/1.1\r\n{head}Content-Length: ".encode("latin-1")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of a connection, or None; loading the machine's authorities takes 20 ms."""
        return ssl.create_default_context() if self.is_tls else None

    def __str__(self) -> str:
        """Return the address in words."""
        return f"unix:{self.uds}" if self.uds is not None else self.base_url
