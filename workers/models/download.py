"""One file from elsewhere: what came stays when the transfer breaks, and only the expected bytes get its name."""

import fcntl
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import httpx2
import msgspec

from workers.errors import ModelUnavailable
from workers.files.atomic import digest_of, git_blob_of, sync_folder

TRIES: Final = 5  # in a row that bring nothing
PAUSE_S: Final = 1.0  # before the second try in vain; so much more before each later one
SILENCE_S: Final = 30.0  # for which a server may send nothing
LOCK_LIMIT_S: Final = 3600.0  # for another program that fetches the same file
LOCK_PAUSE_S: Final = 0.2
LARGEST_BYTES: Final = 2**41  # where nobody has told a size
TELL_S: Final = 5.0
PIECE_BYTES: Final = 1024 * 1024
NO_SUCH_RANGE: Final = 416
GIT_DIGITS: Final = 40
PASSING: Final = frozenset({408, NO_SUCH_RANGE, 425, 429})  # of the client errors, those that may pass
logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int | None], None]  # a file, its bytes that are there, and all where that is known


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file at ``url``, known by its digest; ``size`` is in bytes, None where nobody has told.

    ``digest`` is a SHA-256, or the id of a blob as git has it, which is a SHA-1; both in hexadecimal digits. ``name``
    is what a person is told; None is the name that it gets here.
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


class LoggedProgress:
    """Tells the log how far a file is, every now and then; a ``Progress``."""

    def __init__(self) -> None:
        self._told_at = -math.inf

    def __call__(self, name: str, there: int, size: int | None) -> None:
        """Take that so many bytes are there."""
        now = time.monotonic()
        if now - self._told_at > TELL_S or there == size:
            self._told_at = now
            logger.info("fetching %s: %s%s", name, _mb(there), "" if size is None else f" of {_mb(size)}")


def fetch(session: httpx2.Client, remote: RemoteFile, path: Path, progress: Progress) -> None:
    """Bring a file to ``path``, beginning with what an earlier try has left; a second program waits for the first.

    Raises:
        ModelUnavailable: it cannot be had. What came of it stays for the next try, unless it is another file.
        OSError: it cannot be kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = remote.name or path.name
    with _locked(path):
        if path.is_file() and remote.is_in(path):
            return  # the other program has brought it
        part = path.with_name(f".{path.name}.part")
        transfer = _Transfer(session, remote, name, progress)
        had_rest = part.is_file()
        transfer.run(part)
        if had_rest and not remote.is_in(part):
            part.unlink()  # what was there may have been of another file
            transfer.run(part)
        if not remote.is_in(part):
            part.unlink()
            raise ModelUnavailable(f"{name}: another file came than was expected, by its digest")
        part.replace(path)
        sync_folder(path.parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other programs from fetching to ``path``."""
    lock, until = path.with_name(f".{path.name}.lock"), time.monotonic() + LOCK_LIMIT_S
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ModelUnavailable(f"{path.name}: another program fetches it for an hour already") from None
                time.sleep(LOCK_PAUSE_S)
        yield


class _Transfer:
    """The bytes of one file, in as many tries as bring some."""

    def __init__(self, session: httpx2.Client, remote: RemoteFile, name: str, progress: Progress) -> None:
        self._session = session
        self._remote = remote
        self._name = name
        self._progress = progress

    def __repr__(self) -> str:
        return f"<_Transfer {self._name}>"

    def run(self, part: Path) -> None:
        """Append to ``part`` what is missing of the file."""
        in_vain = 0
        with part.open("ab") as rest:
            while True:
                before = rest.tell()
                try:
                    self._receive(rest)
                    break
                except httpx2.HTTPError as error:
                    in_vain = 1 if rest.tell() > before else in_vain + 1
                    if in_vain == TRIES:
                        raise self._unavailable(str(error) or type(error).__name__) from error
                    time.sleep(PAUSE_S * (in_vain - 1))
            rest.flush()
            os.fsync(rest.fileno())

    def _receive(self, rest: BinaryIO) -> None:
        """Ask once for what is missing."""
        there = rest.tell()
        if there and there == self._remote.size:
            return
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
        try:
            with self._session.stream(
                "GET", self._remote.url, headers=headers, timeout=SILENCE_S, follow_redirects=True
            ) as answer:
                self._check(answer)
                if there and not answer.headers.get("Content-Range", "").startswith(f"bytes {there}-"):
                    rest.seek(there := 0)
                    rest.truncate()
                    if answer.status_code != httpx2.codes.OK:
                        raise httpx2.RemoteProtocolError("the server has no such rest of it")
                self._write(answer, rest, there)
        except (httpx2.InvalidURL, httpx2.TooManyRedirects, httpx2.UnsupportedProtocol) as error:
            raise self._unavailable(str(error)) from error

    def _check(self, answer: httpx2.Response) -> None:
        status = answer.status_code
        if answer.is_client_error and status not in PASSING:
            raise self._unavailable(f"{answer.url.host} answers {status} {answer.reason_phrase}")
        if status != NO_SUCH_RANGE:
            answer.raise_for_status()

    def _write(self, answer: httpx2.Response, rest: BinaryIO, there: int) -> None:
        length = answer.headers.get("Content-Length", "")
        told = there + int(length) if length.isascii() and length.isdigit() else None
        size = self._remote.size if self._remote.size is not None else told
        free = shutil.disk_usage(Path(rest.name).parent).free
        if size is not None and size - there > free:
            text = f"{_mb(size - there)} are missing, and {_mb(free)} are free in {Path(rest.name).parent}"
            raise self._unavailable(text)
        for piece in answer.iter_raw(PIECE_BYTES):
            there += len(piece)
            if there > (LARGEST_BYTES if size is None else size):
                raise self._unavailable(f"more than its {size} bytes came")
            rest.write(piece)
            self._progress(self._name, there, size)
        if size is not None and there < size:
            raise httpx2.RemoteProtocolError(f"{size - there} of {size} bytes did not come")

    def _unavailable(self, because: str) -> ModelUnavailable:
        return ModelUnavailable(f"{self._name} cannot be fetched: {because}")


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
