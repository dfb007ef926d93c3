"""A position tells what its device holds, as the simulation counts it."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.schedule import NAMES, ScheduleName, program, simulate
from torchgpipe.schedule.position import at_once, in_one_piece, position_of
from torchgpipe.schedule.programs import usual_places
from torchgpipe.schedule.simulation import changes


@pytest.mark.parametrize("name", NAMES)
@given(n=st.integers(1, 4), m=st.integers(1, 8))
def test_what_is_held_is_what_the_simulation_counts(name: ScheduleName, n: int, m: int) -> None:
    actions = program(name, m, usual_places(name, n))
    peaks = simulate(actions).peaks
    # Nothing but what waits between I and W.
    cells = len(usual_places(name, n))
    for device, own in enumerate(actions):
        held, waiting = (
            list(accumulate([one for action in own for one in changes(action, memory, waits)]))
            for memory, waits in ((None, None), ([0.0] * cells, [1.0] * cells))
        )
        for k, action in enumerate(own):
            position = position_of(actions, action)
            assert (position.device, position.number, position.total) == (device, k + 1, len(own))
            # The first of the two changes is that of the start.
            assert (len(position.held), len(position.waiting)) == (held[2 * k], waiting[2 * k])
            assert position.most == peaks[device] == max(held)


def test_a_cell_in_one_piece_is_released_at_its_first_half() -> None:
    actions = program("ZeroBubble", 4, [0, 1, 2, 3])
    whole = in_one_piece(actions, lambda i, j: True)
    assert {action.kind for own in whole for action in own} == {"F", "B"}
    assert simulate(whole).peaks == simulate(program("1F1B", 4, [0, 1, 2, 3])).peaks
    assert in_one_piece(actions, lambda i, j: False) == actions
    assert at_once(actions) == {(i, 3) for i in range(4)}
