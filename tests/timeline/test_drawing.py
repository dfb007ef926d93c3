"""The picture of a timeline has all its parts."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from tests.timeline.synthetic import ideal, rows, span
from torchgpipe import GPipe
from torchgpipe.timeline.timeline import Timeline

matplotlib = pytest.importorskip("matplotlib")

from torchgpipe.timeline.drawing import draw  # noqa: E402


def recorded(steps: int = 1) -> Timeline:
    model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu:0", "cpu:1"], chunks=4)
    with torchgpipe.record(model) as timeline:
        for _ in range(steps):
            model(torch.randn(8, 3)).sum().backward()
    return timeline


def boxes(figure: Any) -> list[Any]:
    return [patch for axes in figure.axes for patch in axes.patches]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_box_for_every_cell_with_its_number() -> None:
    figure = draw(ideal(4, 2), rows(2))
    assert len(boxes(figure)) == 4 * 2 * 3
    (axes,) = figure.axes
    assert sorted(text.get_text() for text in axes.texts) == sorted(str(i) for i in range(4) for _ in range(2 * 3))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cuda:0", "cuda:1"]
    assert legend(figure) == ["forward", "recomputation", "backward"]


@pytest.mark.parametrize(("m", "n"), [(8, 4), (32, 1)])
def test_every_number_can_be_read(m: int, n: int) -> None:
    (axes,) = draw(ideal(m, n), rows(n)).axes
    extents = [text.get_window_extent() for text in axes.texts]
    assert len(extents) == m * n * 3
    assert min(text.get_fontsize() for text in axes.texts) >= 4
    for one, other in combinations(extents, 2):
        assert not one.overlaps(other)


def test_copies_waits_and_faults_are_drawn() -> None:
    spans = [
        *ideal(1, 2),
        span("copy", 0, 0, 1.0, 1.1, stream="leaving", other=1),
        span("wait", 0, 1, 1.0, 1.1, other=0),
        span("backward", 0, 0, 8.0, 8.5, failed=True),
    ]
    assert legend(draw(spans, rows(2))) == ["forward", "recomputation", "backward", "copy", "wait", "failed"]


def test_the_halves_of_backward_have_colours_of_their_own() -> None:
    halves = [span("backward of the input", 0, 0, 8, 9), span("backward of the weights", 0, 0, 9, 10)]
    figure = draw(
        [*ideal(1, 1), *halves, span("copy", 0, 0, 1, 2, other=1), span("wait", 0, 0, 1, 2, other=1)], rows(1)
    )
    assert legend(figure)[2:5] == ["backward", "backward: input", "backward: weights"]
    assert len({box.get_facecolor() for box in boxes(figure)}) == 7
    title, names = figure.texts[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert not title.overlaps(names)


def test_partitions_on_one_device_have_a_row_each() -> None:
    (axes,) = draw(ideal(1, 2, devices=["cpu", "cpu"]), rows(2, ["cpu", "cpu"])).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0 on cpu", "1 on cpu"]


def test_a_step_that_is_too_long_for_a_line_goes_on_below() -> None:
    spans = [span("forward", i, 0, i, i + 1) for i in range(400)]
    assert len(draw(spans, rows(1)).axes) == 4


def test_a_step_without_duration_can_be_drawn() -> None:
    draw([span("forward", 0, 0, 1.0, 1.0)], rows(1)).canvas.draw()


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture_is_saved(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"step.{ending}"
    figure = recorded().plot(path)
    assert figure.axes
    assert path.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_the_last_step_is_drawn_unless_another_is_chosen() -> None:
    timeline = recorded(steps=2)
    assert [timeline.plot(step=step).texts[0].get_text()[:6] for step in (None, 0, 1)] == ["Step 1", "Step 0", "Step 1"]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = recorded()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline.plot()
    assert "F0" in str(timeline)
