"""Environment variables are withheld from engines and tools, and files outside the roots from callers."""

from pathlib import Path

import pytest

from service.config.secrets import child_environment
from service.config.source import outside_with_files


def test_variables_named_in_the_configuration_reach_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are mostly keys and passwords. Variables that name places are passed on; our own never are."""
    for name in ("HF_TOKEN", "MY_PASSWORD", "OTHER", "ROUNDHOUSE_API_KEYS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environment = child_environment({"MY_PASSWORD", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "PATH"})
    assert not {"MY_PASSWORD", "HF_TOKEN", "ROUNDHOUSE_API_KEYS"} & environment.keys()
    assert {"OTHER", "CUDA_VISIBLE_DEVICES", "PATH"} <= environment.keys()


def test_a_link_out_of_the_roots_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """The link lies in a readable folder, and its target does not."""
    roots, secret = tmp_path / "roots", tmp_path / "secret"
    adapter = roots / "adapter"
    adapter.mkdir(parents=True)
    secret.write_text("x")
    (adapter / "good").write_text("x")
    assert outside_with_files([roots], adapter) is None
    (adapter / "inside").symlink_to(adapter / "good")
    assert outside_with_files([roots], adapter) is None
    (adapter / "weights").symlink_to(secret)
    assert outside_with_files([roots], adapter) is not None
    (roots / "all").symlink_to(tmp_path)
    assert outside_with_files([roots], roots / "all") is not None
