"""What lies between the sizes that were measured is on a line; a plan in a file is the plan that was saved."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.balancing.planning.models import WIDTH, Residual, mlp, quick
from torchgpipe_balancing import Plan
from torchgpipe_balancing.planning.costs import Costs, LayerCosts
from torchgpipe_balancing.planning.problem import CellCosts, Layer


def sample(number: float, **others: float) -> Layer:
    values = dict.fromkeys(Layer.__dataclass_fields__, number) | others
    return Layer(**values)


def costs(rows: tuple[int, ...], *samples: Layer) -> Costs:
    layer = LayerCosts(("a",), parameters=100, trained=60, buffers=7, samples=samples)
    cells = tuple(CellCosts(*[float(count)] * 6) for count in rows)
    return Costs((layer,), rows, cells, 0.0, 0.0, "cpu", "loss_fn")


THREE = {2: 10.0, 4: 20.0, 8: 80.0}
BESIDE_THREE = {0.5: 2.5, 1: 5.0, 2: 10.0, 3: 15.0, 4: 20.0, 6: 50.0, 8: 80.0, 10: 110.0}


@pytest.mark.parametrize(
    ("known", "rows", "expected", "of_cell"),
    [
        *[(THREE, rows, expected, rows) for rows, expected in BESIDE_THREE.items()],
        ({2: 10.0, 4: 2.0}, 6, 0.0, 6),  # A line that falls ends at 0.
        # What fits with fewer rows is asked also where a single number of micro-batches was.
        ({4: 10.0}, 2, 5.0, 4),
    ],
)
def test_sizes_between_and_beyond_those_measured_are_on_the_nearest_line(
    known: dict[int, float], rows: float, expected: float, of_cell: float
) -> None:
    measured = costs((*known,), *[sample(number, first=0.0) for number in known.values()])
    (layer,) = measured.layers_at(rows, m=1, states=0.0)
    assert layer.forward == layer.kept == layer.crossing == pytest.approx(expected)
    assert measured.cells_at(rows).forward == measured.cells_at(rows).factor == pytest.approx(of_cell)


def test_micro_batches_share_what_the_first_backward_takes_longer() -> None:
    (layer,) = costs((4,), sample(10.0, first=6.0)).layers_at(4, m=3, states=0.0)
    assert (layer.backward, layer.weights, layer.inputs) == (12.0, 12.0, 10.0)


@pytest.mark.parametrize("memory", [None, [5000.0, 5000.0]], ids=["no limit", "limits"])
def test_a_loaded_plan_is_the_saved_one(tmp_path: Path, memory: list[float] | None) -> None:
    model = mlp()
    saved = quick(model, memory=memory, chunks=(2, 4), schedule=("GPipe", "1F1B"), optimizer=1.0)
    saved.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")

    assert loaded == saved
    assert str(loaded) == str(saved)
    assert loaded.plot() == saved.plot()
    if memory is not None:
        assert math.isfinite(loaded.input.devices[0].memory)
    pipeline = loaded.apply(model)
    assert pipeline.balance == saved.balance


def test_a_loaded_plan_of_a_module_needs_the_sample_again(tmp_path: Path) -> None:
    model, rows = Residual(), torch.randn(4, WIDTH)
    saved = quick(model, rows)
    saved.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")

    with pytest.raises(ValueError, match=r"a loaded plan has no sample; give it again: plan.apply\(model, sample\)"):
        loaded.apply(model)
    with pytest.raises(ValueError, match=r"a loaded plan has no sample; give it again: plan.check\(model, sample\)"):
        loaded.check(model)
    check = loaded.check(model, rows, steps=1)
    assert check.predicted_bytes == check.measured_bytes
    applied = loaded.apply(model, rows)
    assert [len(one.parts) for one in applied.layout.partitions] == saved.balance


@pytest.mark.parametrize("content", ["[]", "{}", '{"version": 0}', "<svg/>", ""])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"plan.json has no plan of version 2; make the plan again"):
        Plan.load(path)
