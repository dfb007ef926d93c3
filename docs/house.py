"""Add two directives: drawings in the colours of the page, and tables of measured figures.

.. drawing:: pipeline          embeds docs/images/pipeline.svg; the content is the caption

.. results:: memory_by_mode    makes a table by benchmarks/tables.py, from the committed JSON;
   :fold: Peaks                folds the table under this line
"""

from __future__ import annotations

import re
from html import escape
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from benchmarks import tables

HERE = Path(__file__).resolve().parent


LEAST_LETTERS = 11  # pixels: smaller letters are not readable on a phone


def least_width(svg: str) -> int:
    """Return how many pixels wide a drawing is when its smallest letters are of `LEAST_LETTERS` pixels."""
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', svg)]
    box = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    assert sizes and box, "a drawing has letters and a viewBox"
    return ceil(float(box[1]) * LEAST_LETTERS / min(sizes))


#: A cell with more characters is prose, whose lines break.
_LONG = 80


class Drawing(SphinxDirective):
    """An embedded SVG, in which text has the colour of the page."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        path = HERE / "images" / f"{self.arguments[0]}.svg"
        self.env.note_dependency(str(path))
        svg = path.read_text()
        frame = f'<div class="drawing-frame" style="--least: {least_width(svg)}px">{svg}</div>'
        figure = nodes.figure("", nodes.raw("", frame, format="html"), classes=["drawing"])
        if self.content:
            text, messages = self.parse_inline(" ".join(self.content), lineno=self.content_offset + 1)
            figure += nodes.caption("", "", *text)
            figure += messages
        return [figure]


class Results(SphinxDirective):
    """A table by `benchmarks.tables` from a committed result."""

    required_arguments = 1
    option_spec: ClassVar = {"fold": directives.unchanged_required}
    _literal: ClassVar = re.compile(r"`([^`]+)`")

    def run(self) -> list[nodes.Node]:
        for path in tables.RESULTS.glob("*.json"):
            self.env.note_dependency(str(path))
        header, rule, *rows = (_cells(line) for line in tables.TABLES[self.arguments[0]]().splitlines())
        figures = [cell.endswith(":") for cell in rule]
        group = nodes.tgroup("", cols=len(header))
        group += [nodes.colspec(colwidth=1) for _ in header]
        group += nodes.thead("", self._row(header, figures))
        group += nodes.tbody("", *(self._row(row, figures) for row in rows))
        whole = nodes.table("", group, classes=["results"])
        if "fold" not in self.options:
            return [whole]
        opening = f'<details class="results"><summary>{escape(self.options["fold"])}</summary>'
        return [nodes.raw("", opening, format="html"), whole, nodes.raw("", "</details>", format="html")]

    def _row(self, cells: list[str], figures: list[bool]) -> nodes.row:
        row = nodes.row()
        for cell, is_figure in zip(cells, figures, strict=True):
            paragraph = nodes.paragraph()
            for k, part in enumerate(self._literal.split(cell)):
                paragraph += nodes.literal("", part) if k % 2 else nodes.Text(part)
            kinds = ["figures"] if is_figure else ["prose"] if len(cell) > _LONG else []
            row += nodes.entry("", paragraph, classes=kinds)
        return row


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("drawing", Drawing)
    app.add_directive("results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
