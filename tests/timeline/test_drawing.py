"""The picture of a timeline has all its parts, in a file and in a notebook."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import torchgpipe
from tests.timeline.synthetic import ideal, rows, span
from torchgpipe import GPipe
from torchgpipe.listener.listener import Kind
from torchgpipe.timeline import drawing
from torchgpipe.timeline.span import KINDS, TRANSFERS

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def titles(picture: str) -> list[str | None]:
    return [title.text for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def test_a_step_is_drawn_into_a_file_and_in_a_notebook(tmp_path: Path) -> None:
    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu:0", "cpu:1"], chunks=4)
    with torchgpipe.record(model) as timeline:
        for _ in range(2):
            model(torch.randn(8, 3)).sum().backward()
    picture = timeline.plot(tmp_path / "step.svg", step=0)
    assert (tmp_path / "step.svg").read_text() == picture
    assert [str(words(drawn)[0])[:8] for drawn in (picture, timeline._repr_html_())] == ["Step 0: ", "Step 1: "]
    assert len(titles(picture)) == len(timeline.of_step(0))
    with pytest.raises(ValueError, match=r"must end in \.svg, but got 'step.png'"):
        timeline.plot("step.png")


def test_a_box_for_every_cell_with_its_number() -> None:
    picture = drawing.draw(ideal(4, 2), rows(2))
    assert words(picture)[:5] == ["Step 0: 20000.0 ms", "forward", "recomputation", "backward", "cuda:0"]
    assert sorted(text for text in words(picture) if text in {*"0123"}) == sorted([*"0123"] * 2 * 3)
    assert titles(picture).count("recomputation of micro-batch 3: 1000.00 ms") == 2


def test_all_names_of_kinds_fit() -> None:
    """The last ones were once beyond the edge, where a schedule splits backward and there are copies."""
    others: tuple[Kind, ...] = ("backward of the input", "backward of the weights", "wait")
    spans = [*ideal(1, 2), *(span(kind, 0, 0, 8, 9, other=1) for kind in others)]
    picture = drawing.draw([*spans, span("copy", 0, 0, 0, 1, other=1, failed=True)], rows(2))
    legend = ElementTree.fromstring(picture).findall(f"{SVG}text")[1 : len(KINDS) - len(TRANSFERS) + 2]
    assert legend[-1].text == "failed"
    assert float(legend[-1].attrib["x"]) < 720 - 40


def test_a_step_without_duration_is_drawn() -> None:
    assert "Step 0: 0.0 ms" in words(drawing.draw([span("forward", 0, 0, 1.0, 1.0)], rows(1)))
