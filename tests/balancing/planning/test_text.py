"""A printed plan says what was chosen, from what, and why; a drawn one shows each device and its limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.balancing.planning.models import WIDTH, Attention, mean, mlp, quick, wide
from torchgpipe.schedule import NAMES
from torchgpipe_balancing import Plan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def many() -> Plan:
    """Return a plan with more alternatives than are kept."""
    torch.manual_seed(0)
    return quick(mlp(), schedule=NAMES, chunks=(2, 4, 8))


def rows_of(plan: Plan) -> list[str]:
    """Return the lines of the table of alternatives."""
    return [line for line in str(plan).splitlines() if re.match(r" *\d+  +(\S+ ms|-) ", line)]


def test_what_was_chosen_comes_first(many: Plan) -> None:
    first, *_ = str(many).splitlines()
    rows = -(-16 // many.chunks)
    assert first == (
        f"16 rows on 2 devices: schedule='{many.schedule}', chunks={many.chunks} ({rows} rows), "
        f"balance={many.balance}, nothing recomputed"
    )


def test_ten_alternatives_and_why_each_one_lost(many: Plan) -> None:
    rows = rows_of(many)
    assert len(rows) == len(many.fitting) == 10
    assert rows[0].endswith("chosen")
    for row, one in zip(rows, many.fitting, strict=True):
        assert re.match(rf" *\d+ +[\d.]+ ms.* {re.escape(one.schedule)} +{one.chunks} ", row)
    reason = r"[\d.]+% slower: (more|smaller|larger|backward|cells)|predicted to be no slower, not run"
    assert all(re.search(reason, row) for row in rows[1:]), rows


@pytest.mark.parametrize(
    ("sample", "model", "options", "loss"),
    [
        (torch.randn(4, WIDTH), mlp(), {}, "none: the mean of the output stands in"),
        (torch.randn(4, WIDTH), mlp(), {"loss_fn": mean}, "loss_fn"),
        (
            {
                "words": torch.zeros(2, 5, dtype=torch.long),
                "mask": torch.zeros(5, 5),
                "labels": torch.zeros(2, 5).long(),
            },
            Attention(),
            {"no_chunk": ("mask",)},
            "the model's own",
        ),
    ],
    ids=["none", "given", "own"],
)
def test_where_the_loss_came_from(sample: Any, model: torch.nn.Module, options: dict[str, Any], loss: str) -> None:
    assert f"loss: {loss}\n" in str(quick(model, sample, **options))


def test_what_binds_is_memory_where_there_are_limits() -> None:
    model = wide().to("meta")
    most = max(quick(model, checkpoint=False).best.memory)
    plan = quick(model, memory=[0.9 * most] * 2, margin=0.0)
    text = str(plan)
    assert f"{len(plan.recomputed)} of 6 layers recomputed" in text
    assert "measured on the meta device, without times" in text
    assert "what binds: the memory, most of all of cpu:" in text
    assert "what binds: the time of cpu:" in str(quick(model))


def test_what_does_not_fit_is_told() -> None:
    plan = quick(wide().to("meta"), schedule=("GPipe", "1F1B"), checkpoint=False, memory=[21_000] * 2, margin=0.0)
    assert plan.misfits
    assert re.search(r"does not fit: GPipe with 4 chunks lacks [\d.]+ KiB on cpu:[01]", str(plan))


@pytest.mark.parametrize("memory", [None, [1e6, 2e6]])
@pytest.mark.parametrize("schedule", ["1F1B", "V-Half"])
def test_a_picture_has_a_bar_of_each_cell_and_a_line_of_each_limit(
    tmp_path: Path, schedule: str, memory: Sequence[float] | None
) -> None:
    plan = quick(mlp(), schedule=schedule, memory=memory)
    picture = plan.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == picture
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    words = {one.text for one in root.iter(f"{SVG}text")}
    assert {"cpu:0", "cpu:1"} <= words
    simulation = plan.outcome().simulation
    titles = [one.text for one in root.iter(f"{SVG}title")]
    for own in simulation.starts:
        assert own
        for action, _ in own:
            assert titles.count(str(action)) == 1
    lines = list(root.iter(f"{SVG}line"))
    assert len(lines) == (0 if memory is None else 3)  # One of them in the legend.


def test_a_notebook_shows_both(many: Plan) -> None:
    page = many._repr_html_()
    assert page.startswith("<pre>16 rows on 2 devices: schedule=&#x27;")
    assert "<svg" in page
    ElementTree.fromstring(f"<div>{page}</div>")


def test_a_plan_in_a_list_is_a_line(many: Plan) -> None:
    """It was all measured costs, ten thousand letters, which a notebook stores beside the picture."""
    assert repr(many) == f"<Plan for {str(many).splitlines()[0]}>"
