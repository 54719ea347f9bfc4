"""Names that ``workers`` exports exist where it says."""

import workers


def test_every_exported_name_exists_and_no_other() -> None:
    """Names are imported on first use, so users would be the first to find a wrong module."""
    assert set(workers.__all__) == set(workers._HOMES)
    for name in workers.__all__:
        found = getattr(workers, name)
        assert getattr(found, "__name__", name) == name
