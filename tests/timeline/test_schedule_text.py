"""The schedule as text: each test shows the expected drawing."""

from __future__ import annotations

import pytest

from tests.timeline.synthetic import ideal, rows, span
from torchgpipe.engine.record import Kind
from torchgpipe.timeline.schedule_text import schedule


def test_a_small_step() -> None:
    # 12 seconds on 91 columns: 7.6 columns per second.
    assert schedule(ideal(2, 2), rows(2)).splitlines() == [
        "step 0, 12000.00 ms: F forward, R recomputation, B backward; . nothing computed",
        "0 cuda:0 F0----- F1---- ...............................R1---- B1------------ R0----- B0------------ ",
        "1 cuda:1 ........F0---- F1----- R1---- B1------------- R0---- B0------------ .......................",
    ]


@pytest.mark.parametrize(("m", "n"), [(1, 1), (4, 2), (8, 4), (32, 8), (128, 16)])
def test_it_fits_a_hundred_columns(m: int, n: int) -> None:
    lines = schedule(ideal(m, n), rows(n)).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 1 + 6 * (n + 1)


def test_a_long_step_goes_on_below_and_names_every_cell() -> None:
    text = schedule(ideal(8, 4), rows(4))
    for j in range(4):
        line = "".join(line for line in text.splitlines() if line.startswith(f"{j} cuda:{j}"))
        for i in range(8):
            for name in (f"F{i}", f"R{i}", f"B{i}"):
                assert line.count(name) == 1


def test_a_failed_cell_is_marked() -> None:
    text = schedule([span("forward", 0, 0, 0.0, 0.01), span("forward", 1, 0, 0.01, 0.02, failed=True)], rows(1))
    assert "! failed: forward of micro-batch 1 on partition 0" in text
    assert "F1!" in text


def test_the_halves_of_backward_have_letters_of_their_own() -> None:
    kinds: list[Kind] = ["forward", "backward of the input", "backward of the weights"]
    head, line = schedule([span(kind, 0, 0, k, k + 1) for k, kind in enumerate(kinds)], rows(1)).splitlines()
    assert "B backward (I of the input, W of the weights)" in head
    assert [name for name in ("F0", "I0", "W0") if name in line] == ["F0", "I0", "W0"]


def test_cells_without_duration_are_drawn_as_well() -> None:
    text = schedule([span("forward", 0, 0, 0.0, 0.0), span("backward", 0, 0, 0.0, 0.0)], rows(1))
    assert "F" in text.splitlines()[1]


def test_only_copies() -> None:
    assert schedule([span("copy", 0, 0, 0.0, 1.0, other=1)], rows(2)) == "no cell of the step has run"
