"""Weights are there when an action needs them, in as many slots as there are, with as few uploads as possible."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.schedule import NAMES, Action, Program, ScheduleName, program
from torchgpipe.schedule.programs import usual_places
from torchgpipe.schedule.residency import residency


@st.composite
def programs(draw: st.DrawFn, n: int = 6, m: int = 4) -> Program:
    """Draw a program by name, or actions in any order: residency is that of the order, whether or not it can run."""
    name = draw(st.sampled_from([*NAMES, None]))
    if name is None:
        actions = st.builds(Action, st.sampled_from("FBIW"), st.integers(0, m - 1), st.integers(0, n - 1))
        return draw(st.lists(st.lists(actions, max_size=20), min_size=1, max_size=3))
    places = usual_places(name, draw(st.integers(1, 4)))
    if name in ("Interleaved1F1B", "LayerMajor"):
        places *= draw(st.integers(1, 3))
    return program(name, draw(st.integers(1, m)), places)


@given(lists=programs(), slots=st.integers(1, 5))
def test_weights_are_there_when_they_are_needed_and_never_above_the_slots(lists: Program, slots: int) -> None:
    made = residency(lists, slots)
    for own, stays in zip(lists, made.weights, strict=True):
        for k, action in enumerate(own):
            assert [stay.j for stay in stays if stay.first <= k <= stay.last].count(action.j) == 1
        for k in range(-1, len(own)):
            # While the device runs what comes after action k, the partitions that are there or on their way.
            there = [stay.j for stay in stays if stay.after <= k < stay.last]
            assert len(there) == len(set(there)) <= slots
        for stay in stays:
            assert -1 <= stay.after < stay.first <= stay.last
            assert own[stay.first].j == own[stay.last].j == stay.j
        assert [stay.first for stay in stays] == sorted(stay.first for stay in stays)
        assert [stay.after for stay in stays] == sorted(stay.after for stay in stays), "none waits for a later one"


def fewest_uploads(needed: list[int], slots: int) -> int:
    """Return the fewest uploads by trying every partition that could leave, whenever one has to."""

    @cache
    def from_(k: int, there: frozenset[int]) -> int:
        if k == len(needed):
            return 0
        if needed[k] in there:
            return from_(k + 1, there)
        kept = [frozenset(one) for one in combinations(there, min(len(there), slots - 1))]
        return 1 + min(from_(k + 1, one | {needed[k]}) for one in kept)

    return from_(0, frozenset())


@given(needed=st.lists(st.integers(0, 4), max_size=14), slots=st.integers(1, 4))
def test_uploads_are_as_few_as_possible(needed: list[int], slots: int) -> None:
    made = residency([[Action("F", 0, j) for j in needed]], slots)
    assert made.uploads == fewest_uploads(needed, slots)


@given(lists=programs(), slots=st.integers(1, 5))
def test_gradients_go_down_once(lists: Program, slots: int) -> None:
    for own, stays in zip(lists, residency(lists, slots).gradients, strict=True):
        backward = [(k, j) for k, (kind, _, j) in enumerate(own) if kind != "F"]
        assert sorted(stay.j for stay in stays) == sorted({j for _, j in backward})
        for stay in stays:
            uses = [k for k, j in backward if j == stay.j]
            assert (stay.after + 1, stay.first, stay.last) == (uses[0], uses[0], uses[-1])


@pytest.mark.parametrize(("name", "uploads", "gradients"), [("LayerMajor", 18, 1), ("1F1B", 66, 10), ("GPipe", 70, 10)])
def test_bytes_of_ten_partitions_on_one_device(name: ScheduleName, uploads: int, gradients: int) -> None:
    """1F1B goes through all partitions for each micro-batch, and holds the gradients of all of them meanwhile."""
    made = residency(program(name, 4, [0] * 10), 2)
    assert made.uploads == uploads
    assert made.bytes_up([3] * 10) == 3 * uploads
    assert made.bytes_down([3] * 10) == 30
    (stays,) = made.gradients
    assert max(sum(one.first <= other.first <= one.last for one in stays) for other in stays) == gradients


@given(n=st.integers(1, 4), laps=st.integers(1, 6), m=st.integers(1, 6), slots=st.integers(2, 4))
def test_layer_major_uploads_while_a_whole_partition_computes(n: int, laps: int, m: int, slots: int) -> None:
    made = residency(program("LayerMajor", m, [*range(n)] * laps), slots)
    assert made.uploads == n * (laps + max(0, laps - slots))
    for stays in made.weights:
        assert all(stay.first - stay.after > m for stay in stays if stay.first > 0)


def test_there_must_be_a_slot() -> None:
    with pytest.raises(ValueError, match=r"slots must be 1 or more, but got 0"):
        residency([[]], 0)
