"""Common parts of the drivers: the service's address, httpx's arguments for a request, and errors for httpx's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx

from roundhouse_client.errors import AnswerLost, Unreachable
from roundhouse_client.request import Reply, Request

DEFAULT_URL: Final = "http://127.0.0.1:8080"
LIMIT_S: Final = 30.0  # longest silence; an idle stream sends two keep-alives in that time
CALL_PATIENCE_S: Final = 10.0
# An error before a request was sent means that it was not carried out; after that it may have been.
BEFORE: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
    httpx.InvalidURL,
)
AFTER: Final = (
    httpx.ReadError,
    httpx.ReadTimeout,
    httpx.WriteError,
    httpx.WriteTimeout,
    httpx.CloseError,
    httpx.RemoteProtocolError,
    httpx.DecodingError,
    httpx.TooManyRedirects,
)


class Address:
    """The address of the service, its key, and the longest silence of its answers in seconds.

    Address and key default to ``ROUNDHOUSE_URL`` and ``ROUNDHOUSE_API_KEY``.

    Raises:
        Unreachable: the URL is not an HTTP URL.
    """

    def __init__(self, url: str | None, api_key: str | None, timeout_s: float) -> None:
        url = url or os.environ.get("ROUNDHOUSE_URL") or DEFAULT_URL
        api_key = api_key or os.environ.get("ROUNDHOUSE_API_KEY")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        with translated(url):
            parsed = httpx.URL(self.url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise Unreachable(url, "not a URL of HTTP")

    def __repr__(self) -> str:
        return f"<Address {self.url}>"  # never the key

    def arguments(self, request: Request) -> dict[str, Any]:
        """Return httpx's arguments for a request."""
        limit_s = self._timeout_s if request.limit_s is None else request.limit_s
        query = {name: _word(value) for name, value in request.query.items()}
        return {
            "method": request.method,
            "url": self.url + request.path,
            "params": query or None,
            "headers": {**self._headers, **request.headers},
            "content": request.body,
            "timeout": httpx.Timeout(limit_s + request.wait_s, connect=self._timeout_s, pool=self._timeout_s),
        }


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise errors of this package in place of httpx's.

    Raises:
        Unreachable: nothing was sent.
        AnswerLost: the request may have been sent.
    """
    try:
        yield
    except BEFORE as error:
        raise Unreachable(url, _cause(error)) from error
    except AFTER as error:
        raise AnswerLost(url, _cause(error)) from error


def head_of(response: httpx.Response) -> Reply:
    """Return the head of an answer."""
    return Reply(status=response.status_code, retry_after=response.headers.get("Retry-After"))


def reply_of(response: httpx.Response) -> Reply:
    """Return a whole answer."""
    retry_after = response.headers.get("Retry-After")
    return Reply(status=response.status_code, body=response.content, retry_after=retry_after)


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__


def _word(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
