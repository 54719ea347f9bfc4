"""The address of an engine, and the headers of every request to it."""

import ssl
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of one engine: a host and a port, or a UNIX socket.

    ``base_path`` stands before every path that is asked, without a slash at its end; ``headers`` are sent with every
    request.
    """

    host: str = "127.0.0.1"
    port: int = 80
    uds: str | None = None
    base_path: str = ""
    is_tls: bool = False
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of_url(cls, url: str, headers: Mapping[str, str] | None = None) -> Self:
        """Return the endpoint of an attached server; ``/v1`` at the end of its URL may be left out.

        Raises:
            ValueError: this is no http or https URL of a host.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username:
            shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # never with a password
            raise ValueError(f"{shown!r} is not an http:// or https:// URL of a host; a key goes into headers")
        is_tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if is_tls else 80),
            base_path=parts.path.rstrip("/").removesuffix("/v1"),
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
        """The text before every path."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.base_path}"

    def head(self, path: str, accept: str = "text/event-stream", connection: str = "close") -> bytes:
        """Return the head of a POST up to the value of its Content-Length; ``accept`` is the kind of answer."""
        lines = {
            "Host": self.authority,
            "Content-Type": "application/json",
            "Accept": accept,
            "Accept-Encoding": "identity",
            "Connection": connection,
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.base_path}{path} HTTP/1.1\r\n{head}Content-Length: ".encode("latin-1")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of a connection, or None; loading the machine's authorities takes 20 ms."""
        return ssl.create_default_context() if self.is_tls else None

    def __str__(self) -> str:
        """Say where it is."""
        return f"unix:{self.uds}" if self.uds is not None else self.base_url
