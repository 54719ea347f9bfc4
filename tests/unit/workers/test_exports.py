"""What ``workers`` and ``service`` export is found where they say."""

import service
import workers


def test_every_name_is_there_and_no_other() -> None:
    """Names are imported when they are asked for, so a wrong home would be found by users."""
    assert set(workers.__all__) == set(workers._HOMES)
    for name in workers.__all__:
        found = getattr(workers, name)
        assert getattr(found, "__name__", name) == name


def test_every_name_of_the_service_is_there() -> None:
    """What an inference engine's users catch and read stands beside it."""
    assert set(service.__all__) == {*service._HOMES, "__version__"}
    for name in service.__all__:
        assert getattr(service, name) is not None
