"""Findings on a turn: one word and one sentence for each, the same in the API, the client and the page."""

import re
from pathlib import Path

from service.conversations.record.findings import SENTENCES, Finding, told_of

TURN_PAGE = Path(__file__).parents[3] / "service" / "web" / "static" / "turn.js"


def test_the_page_shows_each_finding_in_the_words_of_the_service() -> None:
    """The page has a table of its own: a finding missing from it would appear as a bare word."""
    table = re.search(r"const FINDINGS = \{(?P<rows>[^}]*)\}", TURN_PAGE.read_text())
    assert table is not None
    assert dict(re.findall(r'(\w+): "([^"]*)"', table["rows"])) == dict(SENTENCES)


def test_each_finding_has_a_sentence_and_an_unknown_one_is_shown_as_it_is() -> None:
    """A later release may have written the row."""
    assert set(SENTENCES) == set(Finding)
    assert told_of(["cut_off", "of_a_later_release"]) == f"{SENTENCES[Finding.CUT_OFF]}; of_a_later_release"
