"""Which of its two runs a layer is in."""

from __future__ import annotations

import threading

import pytest

from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.replay.phase import current_phase, enter_phase

PLAIN, CHECKPOINTING, RECOMPUTING = (False, False), (True, False), (False, True)


def phase() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def test_the_phase_belongs_to_the_thread_and_can_be_handed_over() -> None:
    seen = []

    def run() -> None:
        seen.append(phase())
        with enter_phase(handed):
            seen.append(phase())
        seen.append(phase())

    with enter_phase(RECOMPUTING):
        handed = current_phase()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert phase() == RECOMPUTING
    assert seen == [PLAIN, RECOMPUTING, PLAIN]


def test_phases_nest_and_end_with_an_exception() -> None:
    with enter_phase(CHECKPOINTING):
        with pytest.raises(ZeroDivisionError), enter_phase(RECOMPUTING):
            assert phase() == RECOMPUTING
            raise ZeroDivisionError
        assert phase() == CHECKPOINTING
    assert phase() == PLAIN
