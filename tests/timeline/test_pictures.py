"""The pictures of a timeline have all its parts: in a notebook, without Matplotlib, and drawn by it."""

from __future__ import annotations

import importlib
import sys
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import torchgpipe
from tests.timeline.synthetic import ideal, rows, span
from torchgpipe import GPipe
from torchgpipe.engine.record import Kind
from torchgpipe.timeline import page
from torchgpipe.timeline.span import KINDS
from torchgpipe.timeline.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def draw(*args: Any) -> Any:
    """Draw with Matplotlib."""
    pytest.importorskip("matplotlib")
    return importlib.import_module("torchgpipe.timeline.drawing").draw(*args)


def recorded() -> Timeline:
    """Record two steps."""
    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu:0", "cpu:1"], chunks=4)
    with torchgpipe.record(model) as timeline:
        for _ in range(2):
            model(torch.randn(8, 3)).sum().backward()
    return timeline


def words(picture: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def titles(picture: str) -> list[str | None]:
    return [title.text for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def rows_of(figure: Any) -> list[str]:
    (axes,) = figure.axes
    return [label.get_text() for label in axes.get_yticklabels()]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows the last step as a picture all the same, and where Matplotlib is needed, the extra is named."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    timeline = recorded()
    picture = timeline._repr_html_()
    assert str(words(picture)[0]).startswith("Step 1: ")
    assert len(titles(picture)) == len(timeline.of_step(1))
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline.plot()
    assert "F0" in str(timeline)


def test_a_box_for_every_cell_with_its_number() -> None:
    picture, numbers = page.draw(ideal(4, 2), rows(2)), sorted([*"0123"] * 2 * 3)
    assert words(picture)[:5] == ["Step 0: 20000.0 ms", "forward", "recomputation", "backward", "cuda:0"]
    assert sorted(text for text in words(picture) if text in {*"0123"}) == numbers
    assert titles(picture).count("recomputation of micro-batch 3: 1000.00 ms") == 2

    figure = draw(ideal(4, 2), rows(2))
    (axes,) = figure.axes
    assert len(axes.patches) == 4 * 2 * 3
    assert sorted(text.get_text() for text in axes.texts) == numbers
    assert rows_of(figure) == ["cuda:0", "cuda:1"]
    assert legend(figure) == ["forward", "recomputation", "backward"]


def test_partitions_on_one_device_have_a_row_each() -> None:
    asked = ideal(1, 2, devices=["cpu", "cpu"]), rows(2, ["cpu", "cpu"])
    assert {"0 on cpu", "1 on cpu"} <= {*words(page.draw(*asked))}
    assert rows_of(draw(*asked)) == ["0 on cpu", "1 on cpu"]


@pytest.mark.parametrize(("m", "n"), [(6, 3), (32, 1)])
def test_every_number_can_be_read(m: int, n: int) -> None:
    (axes,) = draw(ideal(m, n), rows(n)).axes
    extents = [text.get_window_extent() for text in axes.texts]
    assert len(extents) == m * n * 3
    assert min(text.get_fontsize() for text in axes.texts) >= 4
    for one, other in combinations(extents, 2):
        assert not one.overlaps(other)


def test_all_kinds_have_names_that_fit_and_colours_of_their_own() -> None:
    """The last ones were once beyond the edge, where a schedule splits backward and there are copies."""
    others: tuple[Kind, ...] = ("backward of the input", "backward of the weights", "wait", "copy")
    spans = [*ideal(1, 2), *(span(kind, 0, 0, 8, 9, other=1) for kind in others)]
    spans.append(span("backward", 0, 0, 9, 10, failed=True))
    names = ElementTree.fromstring(page.draw(spans, rows(2))).findall(f"{SVG}text")[1 : len(KINDS) + 2]
    assert names[-1].text == "failed"
    assert float(names[-1].attrib["x"]) < 720 - 40

    figure = draw(spans, rows(2))
    halves = ["backward: input", "backward: weights"]
    assert legend(figure) == ["forward", "recomputation", "backward", *halves, "copy", "wait", "failed"]
    assert len({box.get_facecolor() for axes in figure.axes for box in axes.patches}) == len(KINDS)
    title, box = figure.texts[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert not title.overlaps(box)


def test_copies_are_strips_below_the_cells() -> None:
    """A copy runs beside a cell, on a stream of its own."""
    spans = [span("forward", 0, 0, 0, 4), span("copy", 0, 0, 1, 2, other=1)]
    cell, copy = ElementTree.fromstring(page.draw(spans, rows(2))).findall(f"{SVG}rect")[-2:]
    assert float(cell.attrib["y"]) + float(cell.attrib["height"]) <= float(copy.attrib["y"])


def test_steps_that_are_short_long_or_failed() -> None:
    short = [span("forward", 0, 0, 1.0, 1.0)], rows(1)
    assert "Step 0: 0.0 ms" in words(page.draw(*short))
    draw(*short).canvas.draw()
    long = [span("forward", i, 0, i, i + 1) for i in range(400)]
    assert len(draw(long, rows(1)).axes) == 4, "it goes on below"
    failed = page.draw([span("backward", 2, 0, 0, 1, failed=True)], rows(1))
    assert titles(failed) == ["backward of micro-batch 2: 1000.00 ms, failed"]


def test_the_picture_is_saved(tmp_path: Path) -> None:
    """The last step is drawn unless another is chosen."""
    pytest.importorskip("matplotlib")
    timeline = recorded()
    for step, ending, begins in ((None, "svg", b"<?xml"), (0, "png", b"\x89PNG")):
        path = tmp_path / f"step.{ending}"
        figure = timeline.plot(path, step=step)
        assert figure.texts[0].get_text().startswith("Step 1" if step is None else "Step 0")
        assert path.read_bytes().startswith(begins)
