"""What ``workers`` exports is found where it says."""

import workers


def test_every_name_is_there_and_no_other() -> None:
    """Names are imported when they are asked for, so a wrong home would be found by users."""
    assert set(workers.__all__) == set(workers._HOMES)
    for name in workers.__all__:
        found = getattr(workers, name)
        assert getattr(found, "__name__", name) == name
