"""Outside input in many spellings: origins, addresses, paths, pipes, and the image's configuration."""

import http.server
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.config.load import load_config
from service.config.source import outside_of
from service.errors import ConfigError
from service.formats.hosts import canonical_host, canonical_origin
from service.node.webhooks import is_public
from service.store.state_folder import own_folder
from tests.harness.processes import running_program

HEALTHCHECK = Path(__file__).parents[3] / "deploy" / "healthcheck.py"


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("http://LocalHost:3000", "http://localhost:3000"),
        ("https://h:443", "https://h"),
        ("http://h:80/", "http://h"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdefghijklmnopabcdefghijklmnop", "chrome-extension://abcdefghijklmnopabcdefghijklmnop"),
        ("Chrome-Extension://ABCDEFGHIJKLMNOPabcdefghijklmnop/", "chrome-extension://abcdefghijklmnopabcdefghijklmnop"),
        (
            "moz-extension://3F2504E0-4f89-11d3-9a0c-0305e82c3301",
            "moz-extension://3f2504e0-4f89-11d3-9a0c-0305e82c3301",
        ),
        ("app://obsidian.md", "app://obsidian.md"),
        ("capacitor://localhost", "capacitor://localhost"),
    ],
)
def test_origins_are_kept_as_browsers_send_them(written: str, sent: str) -> None:
    """The gate compares origins in that form, and so does the answer to a browser's preflight request."""
    assert canonical_origin(written) == sent


@pytest.mark.parametrize(
    "written",
    [
        *("h:80", "ftp://h", "http://u:p@h", "http://*", "http://a b", "http://h:99999", "http://h/path", "http://"),
        *("null", "file://", "file:///x", "javascript://x", "chrome-extension://*", "chrome-extension://", "app://a/b"),
        *("moz-extension://a:80", "app://a@b", "app://a?b", "app://a b", "chrome-extension:abc", "*", "extension://a"),
    ],
)
def test_values_that_no_browser_sends_are_no_origins(written: str) -> None:
    """Such a value would be stored and never match."""
    with pytest.raises(ValueError, match=r"."):
        canonical_origin(written)


def test_a_name_with_a_final_dot_is_the_same_name() -> None:
    """The dot of the root adds nothing."""
    assert canonical_host("Example.com.") == "example.com"


@pytest.mark.parametrize("address", ["64:ff9b:1::7f00:1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "::1", "10.0.0.1"])
def test_addresses_that_lead_back_are_not_public(address: str) -> None:
    """However they are translated on the way."""
    assert not is_public(address)


def test_an_invalid_path_lies_nowhere(tmp_path: Path) -> None:
    """A path with a NUL, or links in a circle."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    for path in (Path("/tmp/a\0b"), tmp_path / "a" / "x", tmp_path / "elsewhere" / ("a" * 300)):
        told = outside_of([tmp_path / "elsewhere"], path)
        assert told is not None
        assert "server.roots" in told


def test_a_configuration_may_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may ask for a password first: the service waits for as long as the pipe is open."""
    monkeypatch.setattr("service.formats.documents.PIPE_WAIT_MS", 10)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="nothing writes to it"):
        load_config(pipe)
    late = "import sys; f = open(sys.argv[1], 'w'); sys.stdin.read(); f.write('models: {m: {engine: embedded}}')"
    with running_program([sys.executable, "-c", late, str(pipe)], stdin=subprocess.PIPE) as writer:
        descriptor = os.open(pipe, os.O_RDONLY)  # opened as a shell does it, once the writer has
        assert writer.stdin is not None
        threading.Timer(0.1, writer.stdin.close).start()
        try:
            assert list(load_config(Path(f"/dev/fd/{descriptor}")).models) == ["m"]
        finally:
            os.close(descriptor)


def test_a_groups_shared_folder_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service cannot change the mode of a volume that a group shares, and need not refuse it."""
    volume, own = tmp_path / "volume", tmp_path / "own"
    volume.mkdir()
    volume.chmod(0o775)
    monkeypatch.setattr(os, "geteuid", lambda: volume.stat().st_uid + 1)
    with own_folder(volume):
        assert volume.stat().st_mode & 0o777 == 0o775
    monkeypatch.undo()
    with own_folder(own):
        assert own.stat().st_mode & 0o777 == 0o700


class _Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_known = self.path == "/readyz" and self.headers["Authorization"] == "Bearer k1"
        self.send_response(200 if is_known else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_the_images_health_check_reads_the_configuration(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration alone may give key and port. Without them a working container would be unhealthy for ever."""
    (tmp_path / "roundhouse.yaml").write_text(
        f"server: {{host: 0.0.0.0, port: '{port}', api_keys: ['${{KEY:-k1}}']}}\n"
    )
    monkeypatch.setenv("ROUNDHOUSE_CONFIG", str(tmp_path / "roundhouse.yaml"))
    runpy.run_path(str(HEALTHCHECK), run_name="__main__")
    monkeypatch.setenv("KEY", "another")
    with pytest.raises(SystemExit):
        runpy.run_path(str(HEALTHCHECK), run_name="__main__")
