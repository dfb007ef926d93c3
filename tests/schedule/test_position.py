"""A position tells what its device holds, as the simulation counts it."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.schedule import NAMES, ScheduleName, program, simulate
from torchgpipe.schedule.position import at_once, position_of
from torchgpipe.schedule.programs import usual_places
from torchgpipe.schedule.simulation import changes


@settings(max_examples=settings.default.max_examples // 3)
@pytest.mark.parametrize("name", NAMES)
@given(n=st.integers(1, 3), m=st.integers(1, 5))
def test_what_is_held_is_what_the_simulation_counts(name: ScheduleName, n: int, m: int) -> None:
    actions = program(name, m, usual_places(name, n))
    peaks = simulate(actions).peaks
    for device, own in enumerate(actions):
        held = list(accumulate([one for action in own for one in changes(action, None, None)]))
        for k, action in enumerate(own):
            position = position_of(actions, action)
            assert (position.device, position.number, position.total) == (device, k + 1, len(own))
            # The first of the two changes is that of the start.
            assert len(position.held) == held[2 * k]
            assert position.most == peaks[device] == max(held)


def test_the_backward_of_the_last_partition_comes_at_once() -> None:
    assert at_once(program("ZeroBubble", 4, [0, 1, 2, 3])) == {(i, 3) for i in range(4)}
