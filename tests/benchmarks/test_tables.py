"""Figures on pages come from committed results. `tests/test_docs.py` compares the tables to the last digit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.tables import README, RESULTS_PAGE, TABLES, render

PAGES = [README, RESULTS_PAGE]
MARKED = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=["README", "results"])
def test_no_line_of_figures_is_copied_by_hand(page: Path) -> None:
    text = page.read_text()
    assert set(MARKED.findall(text)) <= set(TABLES)
    outside = MARKED.sub("", text)
    assert not [line for line in outside.splitlines() if line.startswith("|") and re.search(r"\| *[-+]?\d", line)]


def test_tables_are_found_by_their_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "sums", lambda: "| 1 |")
    page = "Before.\n\n<!-- table: sums -->\n| 0 |\n<!-- end -->\n\n<!-- table: sums -->\n<!-- end -->\nAfter.\n"
    filled = "<!-- table: sums -->\n| 1 |\n<!-- end -->"
    assert render(page) == f"Before.\n\n{filled}\n\n{filled}\nAfter.\n"


def test_what_is_not_measured_yet_leaves_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("sums.json")

    monkeypatch.setitem(TABLES, "sums", missing)
    assert render("<!-- table: sums -->\n| 0 |\n<!-- end -->") == "<!-- table: sums -->\n<!-- end -->"
