"""A driver that stands in for NVIDIA's."""

from pathlib import Path

import pytest

from tests.harness.nvml_machine import built


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the stand-in for the driver's library."""
    return built(tmp_path_factory.mktemp("driver"))
