"""``TrainerClient`` on a whole service, with an engine that plays vLLM; ``tests/engines`` tests broadcasts."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roundhouse_client import TrainerClient, Unreachable, WeightsError
from tests.harness.programs import PROGRAMS
from tests.harness.service import Service, serving


@pytest.fixture
def service(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Service]:
    for name in ("launched", "one", "two"):
        write_checkpoint(tmp_path / name)
    model = {
        "engine": "vllm",
        "model": str(tmp_path / "launched"),
        "command": [sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py")],
        "args": {"fault-file": str(tmp_path / "fault")},
        "slots": 2,
        "restart": {"initial_s": 0.1, "max_s": 0.2, "failures": 50},
    }
    with serving(tmp_path / "service", free_ports(1), {"org/m": model}, {"roots": [str(tmp_path)]}) as running:
        yield running


def write_checkpoint(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)


def test_a_checkpoint_reaches_the_engines(
    service: Service, tmp_path: Path, free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update returns at its end; a refusal or a failure has its reason, and changes nothing."""
    monkeypatch.setenv("ROUNDHOUSE_URL", service.url)
    with TrainerClient(None, "org/m", timeout_s=60) as trainer:
        assert trainer.version == 0
        update = trainer.update_checkpoint(str(tmp_path / "one"))
        assert (update["state"], update["version"], trainer.version) == ("completed", 1, 1)
        for folder, version, code in (
            (tmp_path / "two", 1, "version_not_newer"),
            (tmp_path / "no", 2, "invalid_update"),
        ):
            with pytest.raises(WeightsError) as refused:
                trainer.update_checkpoint(str(folder), version=version)
            assert (refused.value.code, refused.value.document["code"]) == (code, code)
        fault = {"port": 0, "phase": "receive", "do": "fail"}
        (tmp_path / "fault").write_text(json.dumps([fault]))
        with pytest.raises(WeightsError, match="weights 2: ") as failed:
            trainer.update_checkpoint(str(tmp_path / "two"))
        assert (failed.value.code, failed.value.document["state"], trainer.version) == ("weights_failed", "failed", 1)
        assert trainer.look()["update"]["number"] == failed.value.document["number"]
    with TrainerClient(service.url, "gone") as stranger, pytest.raises(WeightsError) as unknown:
        stranger.look()
    assert unknown.value.code == "model_not_found"
    nowhere = f"http://127.0.0.1:{free_ports(1)}"
    with TrainerClient(nowhere, "org/m") as lost, pytest.raises(Unreachable):
        lost.look()
