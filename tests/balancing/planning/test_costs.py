"""What lies between the sizes that were measured is on a line."""

from __future__ import annotations

import pytest

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
    measured = costs((*known,), *[sample(number) for number in known.values()])
    (layer,) = measured.layers_at(rows, states=0.0)
    assert layer.forward == layer.kept == layer.crossing == pytest.approx(expected)
    assert measured.cells_at(rows).forward == measured.cells_at(rows).factor == pytest.approx(of_cell)
