"""A notebook shows a timeline as a picture, without Matplotlib."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import torchgpipe
from tests.timeline.synthetic import ideal, rows, span
from torchgpipe import GPipe
from torchgpipe.engine.record import Kind
from torchgpipe.timeline import page
from torchgpipe.timeline.span import KINDS, TRANSFERS

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def titles(picture: str) -> list[str | None]:
    return [title.text for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def test_a_notebook_shows_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu:0", "cpu:1"], chunks=4)
    with torchgpipe.record(model) as timeline:
        for _ in range(2):
            model(torch.randn(8, 3)).sum().backward()
    picture = timeline._repr_html_()
    assert str(words(picture)[0]).startswith("Step 1: ")
    assert len(titles(picture)) == len(timeline.of_step(1))


def test_a_box_for_every_cell_with_its_number() -> None:
    picture = page.draw(ideal(4, 2), rows(2))
    assert words(picture)[:5] == ["Step 0: 20000.0 ms", "forward", "recomputation", "backward", "cuda:0"]
    assert sorted(text for text in words(picture) if text in {*"0123"}) == sorted([*"0123"] * 2 * 3)
    assert titles(picture).count("recomputation of micro-batch 3: 1000.00 ms") == 2


def test_partitions_on_one_device_have_a_row_each() -> None:
    assert {"0 on cpu", "1 on cpu"} <= {*words(page.draw(ideal(1, 2), rows(2, ["cpu", "cpu"])))}


def test_all_names_of_kinds_fit() -> None:
    """The last ones were once beyond the edge, where a schedule splits backward and there are copies."""
    others: tuple[Kind, ...] = ("backward of the input", "backward of the weights", "wait")
    spans = [*ideal(1, 2), *(span(kind, 0, 0, 8, 9, other=1) for kind in others)]
    picture = page.draw([*spans, span("copy", 0, 0, 0, 1, other=1, failed=True)], rows(2))
    legend = ElementTree.fromstring(picture).findall(f"{SVG}text")[1 : len(KINDS) - len(TRANSFERS) + 2]
    assert legend[-1].text == "failed"
    assert float(legend[-1].attrib["x"]) < 720 - 40


def test_copies_are_strips_below_the_cells() -> None:
    """A copy runs beside a cell, on a stream of its own."""
    spans = [span("forward", 0, 0, 0, 4), span("copy", 0, 0, 1, 2, other=1)]
    cell, copy = ElementTree.fromstring(page.draw(spans, rows(2))).findall(f"{SVG}rect")[-2:]
    assert float(cell.attrib["y"]) + float(cell.attrib["height"]) <= float(copy.attrib["y"])


def test_a_step_without_duration_is_drawn() -> None:
    assert "Step 0: 0.0 ms" in words(page.draw([span("forward", 0, 0, 1.0, 1.0)], rows(1)))


def test_what_has_failed_says_so() -> None:
    assert titles(page.draw([span("backward", 2, 0, 0, 1, failed=True)], rows(1))) == [
        "backward of micro-batch 2: 1000.00 ms, failed"
    ]
