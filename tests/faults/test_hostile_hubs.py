"""Malicious hubs over real sockets: endless files, slow drips, nested brackets, and links in the cache."""

import hashlib
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx2
import pytest

from tests.harness.file_server import Handler, serving
from tests.harness.waiting import LIMIT_S, wait_for
from workers.errors import ModelUnavailable
from workers.models import download, hub
from workers.models.download import RemoteFile, fetch
from workers.models.hub import find_model
from workers.models.hub_cache import INDEX, HubSettings, find_kept, folder_of
from workers.models.hub_name import parse_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = Random(9).randbytes(2 * download.PIECE_BYTES + 3)  # noqa: S311
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MIB = 1024 * 1024


class _Usage(NamedTuple):
    """The usage of a disk, as shutil reports it."""

    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models" / "file.gguf"


def bring(url: str, path: Path, size: int | None = len(CONTENT)) -> None:
    with httpx2.Client(trust_env=False) as session:
        fetch(session, RemoteFile(url=f"{url}/file", digest=SHA256, size=size), path, lambda *_: None)


def part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def send_endlessly(sent: list[int], most: int) -> Callable[[Handler], None]:
    """Send a file without a length, up to a bound that protects this machine."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        with suppress(OSError):  # the other side has gone
            while sum(sent) < most:
                handler.wfile.write(bytes(MIB))
                sent.append(MIB)

    return answer


def test_a_file_of_unknown_size_leaves_room_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs of the machine write there too; the bound is the free space less a reserve."""
    free = 8 * MIB
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: _Usage(100 * MIB, 100 * MIB - free, free))
    sent: list[int] = []
    with serving(send_endlessly(sent, 64 * MIB)) as server, pytest.raises(ModelUnavailable, match="free"):
        bring(server.url, path, size=None)
    assert sum(sent) < 32 * MIB  # what buffers hold beside
    assert not part_of(path).exists()


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Make the kernel refuse all bytes of a file beyond a number, as on a full disk or quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_full_disk_is_reported_and_its_room_is_given_back(path: Path, size: int | None) -> None:
    """The partial file that filled the disk would block every other fetch."""
    with serving(lambda handler: handler.send_rest(CONTENT)) as server:
        with full_after(download.PIECE_BYTES + 10), pytest.raises(ModelUnavailable, match="cannot be kept in"):
            bring(server.url, path, size)
        assert not part_of(path).exists()
        bring(server.url, path, size)
    assert path.read_bytes() == CONTENT


def test_a_partial_download_that_is_a_link_is_not_written_through(path: Path, tmp_path: Path) -> None:
    """Anyone with write access to the cache could otherwise overwrite any file of this user."""
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    path.parent.mkdir()
    part_of(path).symlink_to(other)
    with serving(lambda handler: handler.send_rest(CONTENT)) as server:
        bring(server.url, path)
    assert other.read_bytes() == b"mine"
    assert (path.read_bytes(), path.is_symlink()) == (CONTENT, False)


def drip(stop: threading.Event, head: bytes = b"") -> Callable[[Handler], None]:
    """Send a byte now and then, as long as the client reads."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(head)
        send_drips(handler, stop)

    return answer


def send_drips(handler: Handler, stop: threading.Event) -> None:
    with suppress(OSError):  # the other side has gone
        while not stop.wait(0.02):
            handler.wfile.write(b" ")


def raised_by(function: Callable[[], object], stop: threading.Event) -> list[BaseException | None]:
    """Run a function in a thread, and return the exception it raises, if it ends by itself."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - it is looked at
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: ended, "a hub that drips is given up", LIMIT_S / 4)
    finally:
        stop.set()
        thread.join(LIMIT_S)
    return ended


def test_a_file_that_drips_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives within the limit of a silence; at one in two seconds a start would wait for years."""
    monkeypatch.setattr(download, "RATE_S", 0.1)
    stop = threading.Event()
    with serving(drip(stop)) as server:
        (error,) = raised_by(lambda: bring(server.url, path), stop)
    assert isinstance(error, ModelUnavailable)
    assert "bytes in" in str(error)


def test_a_listing_that_drips_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier fetch can be used instead."""
    monkeypatch.setattr(hub, "LISTING_S", 0.2)
    stop = threading.Event()
    with serving(drip(stop, b"{")) as server:
        settings = HubSettings(endpoint=server.url, cache=tmp_path)
        (error,) = raised_by(lambda: find_model(parse_hub_name("hf:o/r"), settings), stop)
    assert isinstance(error, hub.HubUnreachable)


def test_headers_that_drip_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no body to count."""
    monkeypatch.setattr(hub, "LISTING_S", 0.2)
    stop = threading.Event()

    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        send_drips(handler, stop)

    with serving(answer) as server:
        settings = HubSettings(endpoint=server.url, cache=tmp_path)
        (error,) = raised_by(lambda: find_model(parse_hub_name("hf:o/r"), settings), stop)
    assert isinstance(error, hub.HubUnreachable)


def test_a_listing_of_brackets_is_refused(tmp_path: Path) -> None:
    """At any depth: a start ends with one sentence and no traceback."""
    nested = b'{"sha": "%s", "siblings": [], "more": ' % COMMIT.encode() + b"[" * 1_000_000
    with serving(lambda handler: handler.send(200, nested)) as server:
        settings = HubSettings(endpoint=server.url, cache=tmp_path)
        with pytest.raises(ModelUnavailable, match="lists no files of it"):
            find_model(parse_hub_name("hf:o/r"), settings)


def test_an_index_of_brackets_is_refused(tmp_path: Path) -> None:
    """The checkpoint is fetched again, as with any other unreadable index."""
    name = parse_hub_name(f"hf:o/r@{COMMIT}")
    snapshot = folder_of(name, tmp_path) / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (snapshot / file).write_bytes(b"{}")
    assert find_kept(name, tmp_path) == snapshot
    (snapshot / INDEX).write_bytes(b'{"more": ' + b"[" * 1_000_000)
    assert find_kept(name, tmp_path) is None
