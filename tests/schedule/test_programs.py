"""Clock and programs run every cell once, without a deadlock, with the bubbles and peaks of their papers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.schedule import (
    NAMES,
    Action,
    ScheduleName,
    clock_cycles,
    places_of,
    program,
    program_of,
    simulate,
    verify,
)
from torchgpipe.schedule.action import at_once, with_recomputation
from torchgpipe.schedule.programs import SPLITTING, usual_places

#: The time of forward, with backward of twice that time, or of that time for each half.
F = 1.0


def test_the_picture_of_the_clock() -> None:
    assert list(clock_cycles(4, 2)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1)],
        [(3, 0), (2, 1)],
        [        (3, 1)],
    ]  # fmt: skip


@given(m=st.integers(1, 12), n=st.integers(1, 12))
def test_every_cell_runs_once_at_clock_i_plus_j(m: int, n: int) -> None:
    clocks = list(clock_cycles(m, n))
    assert len(clocks) == m + n - 1
    for clock, cells in enumerate(clocks):
        assert all(i + j == clock for i, j in cells)
        assert [j for _, j in cells] == sorted({j for _, j in cells}), "in the order of their partitions, each once"
    assert sorted(cell for cells in clocks for cell in cells) == [(i, j) for i in range(m) for j in range(n)]


@pytest.mark.parametrize("name", NAMES)
def test_no_program_deadlocks(name: ScheduleName) -> None:
    """All programs for up to eight devices and eight micro-batches."""
    for n in range(1, 9):
        places = usual_places(name, n)
        for m in range(1, 9):
            made = program(name, m, places)
            verify(made, m, places)
            assert any(action.kind == "W" for own in made for action in own) == (name in SPLITTING)


@given(n=st.integers(1, 4), laps=st.integers(1, 4), m=st.integers(1, 20))
def test_any_number_of_laps(n: int, laps: int, m: int) -> None:
    places = [*range(n)] * laps
    for name in ("Interleaved1F1B", "ZeroBubble"):
        verify(program(name, m, places), m, places)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_bubbles_and_peaks_are_those_of_the_papers(n: int, rounds: int) -> None:
    m = rounds * n

    def bubble(name: ScheduleName) -> float:
        """The idle time of a device, as a share of its work."""
        simulation = simulate(program(name, m, usual_places(name, n)))
        return simulation.seconds / simulation.busy[0] - 1

    def peaks(name: ScheduleName) -> list[float]:
        return simulate(program(name, m, usual_places(name, n))).peaks

    assert bubble("GPipe") == pytest.approx((n - 1) / m)
    assert peaks("GPipe") == [m] * n
    assert bubble("1F1B") == pytest.approx((n - 1) / m)
    assert peaks("1F1B") == [n - k for k in range(n)]
    assert bubble("Interleaved1F1B") == pytest.approx((n - 1) / (2 * m))
    assert bubble("ZeroBubble") == pytest.approx((n - 1) / (3 * m))
    assert max(peaks("Interleaved1F1B")) <= 2 * n
    assert max(peaks("ZeroBubble")) <= n
    round_twice = simulate(program("ZeroBubble", m, [*range(n)] * 2))
    assert round_twice.seconds / round_twice.busy[0] - 1 < bubble("Interleaved1F1B") or n == 1


@given(places=st.lists(st.integers(0, 3), min_size=1, max_size=8), m=st.integers(1, 8))
def test_layer_major_fits_any_places(places: list[int], m: int) -> None:
    places = places_of(places)
    made = program("LayerMajor", m, places)
    verify(made, m, places)
    for own in made:
        for kind in "FB":
            # In the order of the partitions, backward from the last; micro-batches are always in the same order.
            cells = [(j, i) for k, i, j in own if k == kind]
            assert cells == sorted(cells, key=lambda cell: (cell[0] if kind == "F" else -cell[0], cell[1]))


@pytest.mark.parametrize(("n", "laps", "rounds"), [(1, 4, 2), (2, 1, 3), (2, 8, 1), (4, 2, 1), (4, 3, 2)])
def test_layer_major_idles_in_the_beginning_and_at_the_end(n: int, laps: int, rounds: int) -> None:
    m = rounds * n
    simulation = simulate(program("LayerMajor", m, [*range(n)] * laps))
    assert simulation.seconds / simulation.busy[0] - 1 == pytest.approx((n - 1) / (m * laps))
    assert simulation.peaks == [m * laps] * (n - 1) + [m * (laps - 1) + 1]


def test_neighbouring_partitions_on_one_device_run_as_one() -> None:
    assert program("1F1B", 1, [0, 0, 1]) == [
        [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0)],
        [Action("F", 0, 2), Action("B", 0, 2)],
    ]


@pytest.mark.parametrize(
    ("name", "places", "message"),
    [
        ("2F2B", [0, 1], "schedule must be one of GPipe, .*, ZB-V, LayerMajor, or a program, but got '2F2B'"),
        ("1F1B", [0, 1, 0], r"next to each other, .* \[0, 1, 0\]; .* \['GPipe', 'LayerMajor'\]"),
        ("ZeroBubble", [0, 1, 1, 0], r"next to each other, .* \[0, 1, 0\]; .* \['GPipe', 'V-Min', .*, 'LayerMajor'\]"),
        ("1F1B", [0, 1, 0, 1], r"\['GPipe', 'Interleaved1F1B', 'ZeroBubble', 'LayerMajor'\]"),
        ("Interleaved1F1B", [0, 1, 1, 0], r"go round the devices, .* \[0, 1, 0\]; give devices=\[a, b, a, b\]"),
        ("V-Half", [0, 1, 0, 1], r"placed like a V, .* \[0, 1, 0, 1\]; give devices=\[a, b, b, a\]"),
    ],
)
def test_placements_that_do_not_fit_are_refused(name: ScheduleName, places: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        program(name, 4, places)


def F_(i: int, j: int) -> Action:
    return Action("F", i, j)


def B_(i: int, j: int) -> Action:
    return Action("B", i, j)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[F_(0, 0)], [F_(0, 1), B_(0, 1)]], r"cell \(0,0\) has \['F'\], but needs F and B"),
        ([[F_(0, 0), B_(0, 0), B_(0, 0)], [F_(0, 1), B_(0, 1)]], r"B\(0,0\) occurs twice"),
        ([[F_(0, 0), F_(0, 1), B_(0, 1), B_(0, 0)], []], r"F\(0,1\) is on device 0, but partition 1 on device 1"),
        ([[B_(0, 0), F_(0, 0)], [F_(0, 1), B_(0, 1)]], r"wait for each other, at B\(0,0\), F\(0,1\)"),
        ([[F_(7, 0)], []], r"F\(7,0\) is no action of 1 micro-batches and 2 partitions"),
    ],
    ids=["incomplete", "twice", "elsewhere", "deadlock", "unknown"],
)
def test_a_program_that_cannot_run_is_refused(lists: list[list[Action]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(lists, 1, [0, 1])


@pytest.mark.parametrize("schedule", [5, [[("F", 0)]], ["F", "B"], lambda m, places: "1F1B"])
def test_what_is_no_program_is_refused(schedule: Any) -> None:
    with pytest.raises(TypeError, match=r"^a program is a list of actions \(kind, i, j\) for each device, .* but got "):
        program_of(schedule, 1, [0])


def test_costs_memory_and_transfers_of_a_simulation() -> None:
    lists = program("1F1B", 2, [0, 1])
    simulation = simulate(lists, {"F": 2, "B": 3, "I": 0, "W": 0}, memory=[5, 7], transfer=1)
    #    0   2   4 5     7 8    11
    # 0  F0  F1  . . . . . . .  b0 ...
    assert simulation.starts[0][0] == (F_(0, 0), 0)
    assert simulation.starts[1][0] == (F_(0, 1), 3)
    assert simulation.starts[0][2] == (B_(0, 0), 9)
    assert simulation.busy == [10, 10]
    assert simulation.peaks == [10, 7]
    assert simulate(lists, lambda action: 10.0 * (action.j == 1)).seconds == 40


def test_the_backward_of_the_last_partition_comes_at_once() -> None:
    assert at_once(program("ZeroBubble", 4, [0, 1, 2, 3])) == {(i, 3) for i in range(4)}


def test_of_all_but_the_last_the_last_is_the_one_that_runs_last() -> None:
    """With the order 1, 2, 0 of the longest in the middle, micro-batch 2 was spared, and 0 ran again at once."""
    lists = program_of("GPipe", 3, [0, 1], [1, 2, 0])
    again = [[action for action in row if action.kind == "R"] for row in with_recomputation(lists, [2, 2])]
    assert again == [[Action("R", 2, 0), Action("R", 1, 0)], [Action("R", 2, 1), Action("R", 1, 1)]]
