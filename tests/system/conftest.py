"""Shared by the tests of whole systems."""

from collections.abc import Iterator

import pytest

from tests.harness.browser import Page, browsing


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Return a browser page that all tests of a file share."""
    with browsing() as opened:
        yield opened
