"""Fetches one file: received bytes survive a broken transfer, and only the expected bytes get the file's name."""

import errno
import fcntl
import logging
import math
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import httpx2
import msgspec

from workers.errors import ModelUnavailable
from workers.files.atomic import digest_of, git_blob_of, sync_folder

TRIES: Final = 5  # tries in a row without a byte
PAUSE_S: Final = 1.0  # before the second failing try; as much more before each later one
SILENCE_S: Final = 30.0  # longest silence of a server
RATE_S: Final = 120.0  # time in which RATE_BYTES must come: an occasional byte would satisfy SILENCE_S
RATE_BYTES: Final = 256 * 1024
LOCK_LIMIT_S: Final = 3600.0  # for another program that fetches the same file
LOCK_PAUSE_S: Final = 0.2
LARGEST_BYTES: Final = 2**41  # if no size is known
RESERVE_BYTES: Final = 2**30  # left free on the disk by such a file
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TELL_S: Final = 5.0
PIECE_BYTES: Final = 1024 * 1024
NO_SUCH_RANGE: Final = 416
GIT_DIGITS: Final = 40
PASSING: Final = frozenset({408, NO_SUCH_RANGE, 425, 429})  # client errors that may pass
logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int | None], None]  # a file, its bytes so far, and its size if known


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file at ``url``, known by its digest; ``size`` is in bytes, None if unknown.

    ``digest`` is a SHA-256, or Git's id of a blob, which is a SHA-1; both in hexadecimal digits. ``name`` is shown to
    people; None shows the name that it gets here.
    """

    url: str
    digest: str
    size: int | None = None
    name: str | None = None

    def is_in(self, path: Path) -> bool:
        """Whether the file at ``path`` is this one.

        Raises:
            OSError: it cannot be read.
        """
        found = git_blob_of(path) if len(self.digest) == GIT_DIGITS else digest_of(path)
        return found == self.digest


class LeastRate:
    """Cuts off the connections of a block's requests if they bring too little.

    ``least`` bytes must come in each ``seconds``; None requires the whole answer in ``seconds``. Requests take
    ``headers`` and ``extensions`` from it.
    """

    headers: Final = {"Connection": "close"}  # a reused connection is not reported

    def __init__(self, seconds: float, least: int | None = None) -> None:
        self._seconds = seconds
        self._least = least
        self._came = 0
        self._sockets: list[socket.socket] = []
        self._is_over = threading.Event()
        self.fault: str | None = None

    def __repr__(self) -> str:
        return f"<LeastRate {self._came} bytes in {self._seconds:g} s>"

    @property
    def extensions(self) -> dict[str, Any]:
        """The extensions for a request: they report its connections."""
        return {"trace": self._note_event}

    def note(self, count: int) -> None:
        """Count bytes that have come."""
        self._came += count

    def __enter__(self) -> Self:
        """Begin to watch."""
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self._is_over.set()

    def _note_event(self, name: str, info: Mapping[str, Any]) -> None:
        if name == "connection.connect_tcp.complete":
            self._sockets.append(info["return_value"].get_extra_info("socket"))

    def _look(self) -> None:
        while not self._is_over.wait(self._seconds):
            if self._least is not None and self._came >= self._least:
                self._came = 0
                continue
            self.fault = f"only {self._came:,} bytes in {self._seconds:g} s"
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            return


class LoggedProgress:
    """Logs the progress of a file every ``TELL_S``; a ``Progress``."""

    def __init__(self) -> None:
        self._logged_at = -math.inf

    def __call__(self, name: str, there: int, size: int | None) -> None:
        """Log the bytes so far if it is time, or if they are all."""
        now = time.monotonic()
        if now - self._logged_at > TELL_S or there == size:
            self._logged_at = now
            logger.info("fetching %s: %s%s", name, _mb(there), "" if size is None else f" of {_mb(size)}")


def fetch(session: httpx2.Client, remote: RemoteFile, path: Path, progress: Progress) -> None:
    """Fetch a file to ``path``, continuing an earlier try; a second program waits for the first.

    Raises:
        ModelUnavailable: it cannot be fetched. Received bytes stay for the next try, unless they are another file's or
            have filled the disk.
        OSError: it cannot be kept for another reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(session, remote, path, progress)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _part_of(path).unlink(missing_ok=True)
        name = remote.name or path.name
        raise ModelUnavailable(f"{name} cannot be kept in {path.parent}: {error.strerror}") from error


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _fetch(session: httpx2.Client, remote: RemoteFile, path: Path, progress: Progress) -> None:
    name = remote.name or path.name
    with _locked(path):
        if path.is_file() and remote.is_in(path):
            return  # the other program has fetched it
        part = _part_of(path)
        transfer = _Transfer(session, remote, name, part, progress)
        had_rest = part.is_file()
        transfer.run()
        if had_rest and not remote.is_in(part):
            part.unlink()  # the earlier bytes may have been another file's
            transfer.run()
        if not remote.is_in(part):
            part.unlink()
            raise ModelUnavailable(f"{name}: another file arrived than expected, by its digest")
        part.replace(path)
        sync_folder(path.parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other programs from fetching to ``path``."""
    lock, until = path.with_name(f".{path.name}.lock"), time.monotonic() + LOCK_LIMIT_S
    with _open_own(lock) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ModelUnavailable(f"{path.name}: another program has been fetching it for an hour") from None
                time.sleep(LOCK_PAUSE_S)
        yield


def _open_own(path: Path) -> BinaryIO:
    """Open a file for appending; replace anything that is no plain file: a link may lead to another user's file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(path, flags, 0o666), "ab")
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENXIO}:
            raise
        path.unlink()
        return os.fdopen(os.open(path, flags | os.O_EXCL, 0o666), "ab")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    path.unlink()
    return os.fdopen(os.open(path, flags | os.O_EXCL, 0o666), "ab")


class _Transfer:
    """The bytes of one file, in as many tries as bring some."""

    def __init__(self, session: httpx2.Client, remote: RemoteFile, name: str, part: Path, progress: Progress) -> None:
        self._session = session
        self._remote = remote
        self._part = part
        self._name = name
        self._progress = progress

    def __repr__(self) -> str:
        return f"<_Transfer {self._name}>"

    def run(self) -> None:
        """Append the missing bytes of the file."""
        in_vain = 0
        with _open_own(self._part) as rest:
            while True:
                before, rate = rest.tell(), LeastRate(RATE_S, RATE_BYTES)
                try:
                    with rate:
                        self._receive(rest, rate)
                    break
                except httpx2.HTTPError as error:
                    in_vain = 1 if rest.tell() > before and rate.fault is None else in_vain + 1
                    if in_vain == TRIES:
                        raise self._unavailable(rate.fault or str(error) or type(error).__name__) from error
                    time.sleep(PAUSE_S * (in_vain - 1))
            rest.flush()
            os.fsync(rest.fileno())

    def _receive(self, rest: BinaryIO, rate: LeastRate) -> None:
        """Ask once for the missing bytes."""
        there = rest.tell()
        if there and there == self._remote.size:
            return
        headers = {"Accept-Encoding": "identity", **rate.headers} | ({"Range": f"bytes={there}-"} if there else {})
        try:
            with self._session.stream(
                "GET",
                self._remote.url,
                headers=headers,
                timeout=SILENCE_S,
                follow_redirects=True,
                extensions=rate.extensions,
            ) as answer:
                self._check(answer)
                if there and not answer.headers.get("Content-Range", "").startswith(f"bytes {there}-"):
                    rest.seek(there := 0)
                    rest.truncate()
                    if answer.status_code != httpx2.codes.OK:
                        raise httpx2.RemoteProtocolError("the server does not have the rest of it")
                self._write(answer, rest, there, rate)
        except (httpx2.InvalidURL, httpx2.TooManyRedirects, httpx2.UnsupportedProtocol) as error:
            raise self._unavailable(str(error)) from error

    def _check(self, answer: httpx2.Response) -> None:
        status = answer.status_code
        if answer.is_client_error and status not in PASSING:
            raise self._unavailable(f"{answer.url.host} answers {status} {answer.reason_phrase}")
        if status != NO_SUCH_RANGE:
            answer.raise_for_status()

    def _write(self, answer: httpx2.Response, rest: BinaryIO, there: int, rate: LeastRate) -> None:
        length = answer.headers.get("Content-Length", "")
        declared = there + int(length) if length.isascii() and length.isdigit() else None
        size = self._remote.size if self._remote.size is not None else declared
        free = shutil.disk_usage(self._part.parent).free
        if size is not None and size - there > free:
            text = f"{_mb(size - there)} are missing, and {_mb(free)} are free in {self._part.parent}"
            raise self._unavailable(text)
        most = size if size is not None else min(LARGEST_BYTES, there + free - RESERVE_BYTES)
        for piece in answer.iter_raw():
            there += len(piece)
            rate.note(len(piece))
            if there > most:
                raise self._too_large(rest, size, free)
            rest.write(piece)
            self._progress(self._name, there, size)
        if size is not None and there < size:
            raise httpx2.RemoteProtocolError(f"{size - there} of {size} bytes are missing")

    def _too_large(self, rest: BinaryIO, size: int | None, free: int) -> ModelUnavailable:
        if size is not None:
            return self._unavailable(f"more than its {size} bytes arrived")
        rest.truncate(0)
        self._part.unlink(missing_ok=True)  # the next try would find the disk just as full
        text = f"its size is unknown, and it does not fit into the {_mb(free)} that are free in {self._part.parent}"
        return self._unavailable(text)

    def _unavailable(self, because: str) -> ModelUnavailable:
        return ModelUnavailable(f"{self._name} cannot be fetched: {because}")


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
