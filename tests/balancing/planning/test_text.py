"""A printed plan says what was chosen, from what, and why; a drawn one shows each device and its limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.balancing.planning.models import mean, mlp, quick, wide
from torchgpipe.schedule import NAMES
from torchgpipe_balancing import Plan
from torchgpipe_balancing.planning.problem import CellCosts

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def many() -> Plan:
    """Return a plan with more alternatives than are kept."""
    torch.manual_seed(0)
    return quick(mlp(), schedule=NAMES, chunks=(2, 4, 8))


def words_of(plan: Plan) -> str:
    """Return a printed plan without its breaks of lines."""
    assert all(len(line) <= 92 for line in str(plan).splitlines())
    return " ".join(str(plan).split())


def test_what_was_chosen_comes_first_and_ten_alternatives_follow_with_what_each_one_lost_by(many: Plan) -> None:
    rows = -(-16 // many.chunks)
    assert words_of(many).startswith(
        f"16 rows on 2 devices: schedule='{many.schedule}', chunks={many.chunks} ({rows} rows), "
        f"balance={many.balance}, nothing recomputed a step is predicted to take "
    )
    lines = [line for line in str(many).splitlines() if re.match(r" *\d+  +(\S+ ms|-) ", line)]
    assert len(lines) == len(many.fitting) == 10
    assert lines[0].endswith("chosen")
    for line, one in zip(lines, many.fitting, strict=True):
        assert re.match(rf" *\d+ +[\d.]+ ms +{re.escape(one.schedule)} +{one.chunks} ", line)
    reason = r"[\d.]+% slower: (\d+% idle|smaller|larger|backward|cells|overhead)|not slower by prediction, not run"
    assert all(re.search(reason, line) for line in lines[1:]), lines


@pytest.mark.parametrize(
    ("changes", "per_row", "reason"),
    [
        ({"bubble": 0.5}, 0.0, "50% idle"),
        ({"recomputing": 2.0}, 0.0, "0 recomputed"),
        ({"working": 3.0}, 0.0, "larger micro-batches"),
        # It recomputes as much as the best, nothing; that was given as the reason where all else took less.
        ({"working": 0.5}, 0.1, "overhead"),
    ],
)
def test_the_reason_is_what_takes_longer(many: Plan, changes: Any, per_row: float, reason: str) -> None:
    question, costs = many.question, many.question.costs
    cells = tuple(CellCosts(step=per_row * rows) for rows in costs.rows)
    alike = replace(many.best, seconds=1.0, bubble=0.1, working=1.8, recomputing=0.0, chunks=2, measured=0.0)
    fitting = (replace(alike, chunks=4), replace(alike, seconds=2.0, **changes))
    plan = replace(many, fitting=fitting, question=replace(question, costs=replace(costs, cells=cells)))
    assert words_of(plan).count(f"slower: {reason}") == 1


@pytest.mark.parametrize(
    ("options", "loss"), [({}, "none: the mean of the output stands in"), ({"loss_fn": mean}, "loss_fn")]
)
def test_where_the_loss_came_from(options: dict[str, Any], loss: str) -> None:
    assert f"loss: {loss} device " in words_of(quick(mlp(), **options))


def test_what_binds_is_memory_where_there_are_limits_and_what_does_not_fit_is_told() -> None:
    model = wide().to("meta")
    most = max(quick(model, checkpoint=False).best.memory)
    plan = quick(model, memory=[0.9 * most] * 2, margin=0.0)
    assert f"{len(plan.recomputed)} of 6 layers recomputed" in words_of(plan)
    assert "measured on the meta device, without times" in words_of(plan)
    assert "what binds: the memory, most of all of cpu:" in words_of(plan)
    assert "what binds: the time of cpu:" in words_of(quick(model))
    plan = quick(model, schedule=("GPipe", "1F1B"), checkpoint=False, memory=[21_000] * 2, margin=0.0)
    assert plan.misfits
    assert re.search(r"does not fit: GPipe with 4 chunks lacks [\d.]+ KiB on cpu:[01]", str(plan))


@pytest.mark.parametrize("memory", [None, [1e6, 2e6]])
@pytest.mark.parametrize("schedule", ["1F1B", "V-Half"])
def test_a_picture_has_a_box_of_each_cell_and_a_line_of_each_limit(
    tmp_path: Path, schedule: str, memory: Sequence[float] | None
) -> None:
    plan = quick(mlp(), schedule=schedule, memory=memory)
    picture = plan.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == picture
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert {"cpu:0", "cpu:1"} <= {one.text for one in root.iter(f"{SVG}text")}
    titles = [str(one.text) for one in root.iter(f"{SVG}title")]
    cells = [str(action) for own in plan.outcome().simulation.starts for action, _ in own]
    assert cells and all(titles.count(cell) == 1 for cell in cells)
    assert sum(title.startswith("limit: ") for title in titles) == (0 if memory is None else 2)


def test_a_notebook_shows_both_and_a_list_has_a_line(many: Plan) -> None:
    """The line was all measured costs, ten thousand letters, which a notebook stores beside the picture."""
    page = many._repr_html_()
    assert page.startswith("<pre>16 rows on 2 devices: schedule=&#x27;")
    assert "<svg" in page
    ElementTree.fromstring(f"<div>{page}</div>")
    assert re.fullmatch(r"<Plan for 16 rows on 2 devices: schedule=.* nothing recomputed>", repr(many))
