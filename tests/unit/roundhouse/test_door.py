"""``import roundhouse``, and the distribution that it belongs to."""

import subprocess
import sys
from importlib.metadata import distribution

import pytest

import roundhouse
import workers
from workers.distribution import NAME, own_version

PARTS = ("roundhouse_client", "service", "workers", "transport", "anyio", "httpx", "msgspec", "importlib.metadata")


def test_the_door_has_the_names_it_exports() -> None:
    """Each name is imported on first use; an unknown one is an AttributeError, as with any module."""
    values = {"NOT_FOUND", "NO_SLOT_AVAILABLE", "INFER_DONE", "INFER_START", "__version__"}
    for name in roundhouse.__all__:
        found = getattr(roundhouse, name)
        assert name in values or found.__name__ == name
    assert set(roundhouse.__all__) >= {*workers.__all__, *roundhouse._HOMES}
    assert roundhouse.__version__ == own_version() == distribution(NAME).version
    assert set(roundhouse.__all__) == set(dir(roundhouse))
    with pytest.raises(AttributeError, match="no attribute 'Fleet'"):
        _ = roundhouse.Fleet


def test_the_door_alone_imports_nothing() -> None:
    """A program pays only for the names that it uses."""
    script = "import sys, roundhouse; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert {"roundhouse"} == {"roundhouse", *PARTS} & set(told.stdout.split())
