"""The package indexes that pip and uv are configured with, in files and variables."""

from pathlib import Path

import pytest

from workers.models.package_index import IndexSettings, read_settings

PIP = """
[global]
index-url = https://pip.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
cert = /etc/ssl/own.pem
[download]
find_links = /wheels
"""
UV = """
no-index = false
find-links = ["/uv-wheels"]
[[index]]
url = "https://uv.example/simple"
default = true
[[index]]
name = "more"
url = "https://more.example/simple"
[[index]]
url = "https://apart.example/simple"
explicit = true
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, text in (("pip/pip.conf", PIP), ("uv/uv.toml", UV)):
        path = tmp_path / "home" / ".config" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "home"


def read(home: Path, **environment: str) -> IndexSettings:
    return read_settings(environment, home, home / "venv", home / "etc")


def test_files_of_pip_and_uv_are_read(home: Path) -> None:
    """Lists are joined, uv's default comes before pip's, and an index for named packages only is left out."""
    assert read(home) == IndexSettings(
        index="https://uv.example/simple",
        extra_indexes=("https://more.example/simple", "https://one.example/simple", "https://two.example/simple"),
        find_links=("/uv-wheels", "/wheels"),
        certificates="/etc/ssl/own.pem",
    )


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({"PIP_INDEX_URL": "https://p.example"}, "https://p.example"),
        ({"UV_INDEX_URL": "https://u.example", "PIP_INDEX_URL": "https://p.example"}, "https://u.example"),
        ({"UV_DEFAULT_INDEX": "mine=https://d.example?a=b", "UV_INDEX_URL": "x"}, "https://d.example?a=b"),
        ({"UV_DEFAULT_INDEX": "https://d.example/?a=b"}, "https://d.example/?a=b"),
    ],
)
def test_variables_come_before_files(home: Path, variables: dict[str, str], index: str) -> None:
    """As they do for pip and uv."""
    assert read(home, **variables).index == index


def test_settings_that_disable_files_are_respected(home: Path) -> None:
    """PIP_CONFIG_FILE set to the null device and UV_NO_CONFIG leave the public index."""
    assert read(home, PIP_CONFIG_FILE="/dev/null", UV_NO_CONFIG="1") == IndexSettings()
    only = read(home, PIP_CONFIG_FILE="/dev/null", UV_NO_CONFIG="1", PIP_NO_INDEX="true", UV_FIND_LINKS="/a,/b")
    assert (only.no_index, only.find_links) == (True, ("/a", "/b"))


def test_a_file_of_the_python_environment_comes_before_the_users(home: Path) -> None:
    """The file that PIP_CONFIG_FILE names comes before both."""
    for name in ("venv/pip.conf", "own.conf"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(f"[global]\nindex-url = https://{name.partition('/')[0]}.example\n")
    assert read(home, UV_NO_CONFIG="1").index == "https://venv.example"
    assert read(home, UV_NO_CONFIG="1", PIP_CONFIG_FILE=str(home / "own.conf")).index == "https://own.conf.example"


@pytest.mark.parametrize("text", ["[global\n", "index-url = x", "\x00\xff", "[[index]]\nname = 1\n", "index = 3"])
def test_a_damaged_file_is_ignored(home: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names it."""
    for name in ("pip/pip.conf", "uv/uv.toml"):
        (home / ".config" / name).write_bytes(text.encode("latin-1"))
    assert read(home).index in {None, "x"}
    assert "is ignored" in caplog.text
