"""Tables of modules in the documents match the modules' docstrings."""

from pathlib import Path

import pytest

from tests.documents.pages import ROOT
from tools.module_tables import pages, sentence, with_tables


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_of_modules_matches_the_docstrings(page: Path) -> None:
    """``python tools/module_tables.py`` writes them; by hand they would drift with each file that moves."""
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text


def test_a_row_is_the_first_sentence_of_a_docstring(tmp_path: Path) -> None:
    """Names of programs have dots, and code is quoted as in Markdown."""
    module = tmp_path / "module.py"
    module.write_text('"""Reads ``GET /slots`` of llama.cpp\'s server,\nonce. Pure.\n\nMore.\n"""\n')
    assert sentence(module) == "Reads `GET /slots` of llama.cpp's server, once"
