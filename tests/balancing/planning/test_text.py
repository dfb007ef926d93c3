"""A printed plan has what was chosen and the other candidates; a drawn one shows each device and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.balancing.planning.models import mean, mlp, quick, wide
from torchgpipe.schedule import NAMES
from torchgpipe_balancing import Plan

SVG = "{http://www.w3.org/2000/svg}"


def words_of(plan: Plan) -> str:
    """Return a printed plan without its breaks of lines."""
    assert all(len(line) <= 92 for line in str(plan).splitlines())
    return " ".join(str(plan).split())


def test_what_was_chosen_comes_first_and_each_candidate_has_a_row() -> None:
    plan = quick(mlp(), schedule=NAMES, chunks=(2, 4, 8))
    assert len(plan.fitting) == 10
    words = words_of(plan)
    times = "" if plan.best.fitted is None else " at these times"
    assert words.startswith(f"16 rows on 2 devices: schedule='{plan.schedule}'{times}, chunks={plan.chunks} (")
    assert f"balance={plan.balance}, nothing recomputed" in words.split("predicted")[0]
    rows = str(plan).splitlines()[-10:]
    for row, candidate in zip(rows, plan.fitting, strict=True):
        assert {candidate.schedule, str(candidate.chunks), f"{candidate.bubble:.0%}"} <= set(row.split())
    assert repr(plan).startswith("<Plan for 16 rows on 2 devices: schedule=") and "\n" not in repr(plan)


@pytest.mark.parametrize(
    ("options", "loss"), [({}, "none: the mean of the output stands in"), ({"loss_fn": mean}, "loss_fn")]
)
def test_where_the_loss_came_from(options: dict[str, Any], loss: str) -> None:
    assert f"loss: {loss} device " in words_of(quick(mlp(), **options))


def test_what_is_recomputed_is_told_and_that_there_are_no_times() -> None:
    model = wide().to("meta")
    most = max(quick(model, checkpoint=False).best.memory)
    plan = quick(model, memory=[0.9 * most] * 2, margin=0.0)
    assert f"{len(plan.recomputed)} of 6 layers recomputed" in words_of(plan)
    assert "measured on the meta device, without times" in words_of(plan)


@pytest.mark.parametrize("memory", [None, [1e6, 2e6]])
@pytest.mark.parametrize("schedule", ["1F1B", "V-Half"])
def test_a_picture_has_a_box_of_each_cell_and_a_line_of_each_limit(
    tmp_path: Path, schedule: str, memory: Sequence[float] | None
) -> None:
    plan = quick(mlp(), schedule=schedule, memory=memory)
    picture = plan.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == picture
    titles = [str(one.text) for one in ElementTree.fromstring(picture).iter(f"{SVG}title")]
    cells = [str(action) for own in plan.outcome().simulation.starts for action, _ in own]
    assert cells and all(titles.count(cell) == 1 for cell in cells)
    assert sum(title.startswith("limit: ") for title in titles) == (0 if memory is None else 2)
