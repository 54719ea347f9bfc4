"""What tests of whole systems share."""

from collections.abc import Iterator

import pytest

from tests.harness.browser import Page, browsing


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Return a page of a browser, one for all tests of a file."""
    with browsing() as opened:
        yield opened
