"""``import roundhouse``, and the distribution that it comes from."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import roundhouse
import service
import workers
from service.cli import main
from service.cli.conventions import Exit
from workers.distribution import COMMAND, FORMER_NAME, NAME, former_version, own_version

PARTS = ("roundhouse_client", "service", "workers", "transport", "anyio", "httpx", "msgspec", "importlib.metadata")


def test_the_door_has_what_it_names() -> None:
    """Each name is looked up where it is asked for; another is an AttributeError, as of any module."""
    values = {"NOT_FOUND", "NO_SLOT_AVAILABLE", "INFER_DONE", "INFER_START", "__version__"}
    for name in roundhouse.__all__:
        found = getattr(roundhouse, name)
        assert name in values or found.__name__ == name
    assert set(roundhouse.__all__) >= {*workers.__all__, *service.__all__}
    assert roundhouse.__version__ == own_version() == distribution(NAME).version
    assert set(roundhouse.__all__) == set(dir(roundhouse))
    with pytest.raises(AttributeError, match="no attribute 'Fleet'"):
        _ = roundhouse.Fleet


def test_the_door_alone_imports_nothing() -> None:
    """A program that imports it pays for what it takes from there."""
    script = "import sys, roundhouse; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert {"roundhouse"} == {"roundhouse", *PARTS} & set(told.stdout.split())


def test_beside_an_installation_of_the_former_name_no_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both bring the same files, so the line says how to be rid of the older one; another project's may stay."""
    assert former_version() is None
    folder = tmp_path / f"{FORMER_NAME}-0.0.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {FORMER_NAME}\nVersion: 0.0.9\n")
    (folder / "entry_points.txt").write_text("[console_scripts]\nroundhouse = horses.stable:main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert former_version() is None
    (folder / "entry_points.txt").write_text(f"[console_scripts]\nroundhouse = {COMMAND}\n")
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == Exit.USAGE
    told = capsys.readouterr().err
    assert "Roundhouse 0.0.9 is installed beside this one" in told
    assert "pip uninstall roundhouse\n" in told
