"""A tracker holds each skip until its pop. `test_plain` tests what the layers of plain models see."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.layers import Apply
from tests.skip.layers import Pop, Stash, pair
from torchgpipe.skip.namespace import SkipKey
from torchgpipe.skip.tracker import SkipTracker, current_skip_tracker

KEY = SkipKey(None, "skip")


def test_a_skip_is_popped_once() -> None:
    tracker, x, layer = SkipTracker(), torch.zeros(1), nn.Identity()
    tracker.stash(KEY, x, layer)
    assert tracker.pop(KEY) is x
    with pytest.raises(KeyError):
        tracker.pop(KEY)


def test_none_is_a_skip() -> None:
    tracker = SkipTracker([(KEY, None)])
    assert tracker.pop(KEY) is None


def test_what_has_arrived_is_popped_and_what_leaves_is_taken() -> None:
    a, b = SkipKey(None, "a"), SkipKey(None, "b")
    x, y = torch.zeros(1), torch.ones(1)
    tracker = SkipTracker([(a, x)])
    tracker.stash(b, y, nn.Identity())
    assert tracker.pop(a) is x and tracker.take([b])[0] is y and tracker.take([]) == ()


def test_the_innermost_tracker_is_the_current_one_of_its_thread() -> None:
    outermost = current_skip_tracker()
    outer, inner = SkipTracker(), SkipTracker()
    others: list[SkipTracker] = []
    with outer:
        with pytest.raises(ZeroDivisionError), inner:
            assert current_skip_tracker() is inner
            thread = threading.Thread(target=lambda: others.append(current_skip_tracker()))
            thread.start()
            thread.join()
            raise ZeroDivisionError
        assert current_skip_tracker() is outer
    assert current_skip_tracker() is outermost
    assert others[0] not in (outermost, outer, inner)


# A plain model that fails between a stash and its pop. The thread's tracker is not notified.


class Scene:
    """A plain model that can fail between stash and pop, and the memory of its skips."""

    def __init__(self) -> None:
        self.fails = True
        self.skips: list[StorageWeakRef] = []
        stashing, popping = pair(self.make)
        self.model = nn.Sequential(stashing, Apply(self.middle), popping)

    def make(self, x: torch.Tensor) -> torch.Tensor:
        skip = x + 1
        self.skips.append(StorageWeakRef(skip.untyped_storage()))
        return skip

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ZeroDivisionError
        return x

    def fail(self) -> None:
        with pytest.raises(ZeroDivisionError):
            self.model(torch.zeros(1))


def test_the_next_call_frees_what_was_left() -> None:
    scene = Scene()
    scene.fail()
    scene.fails = False
    output = scene.model(torch.zeros(1))
    assert [skip.expired() for skip in scene.skips] == [True, True]
    torch.testing.assert_close(output, torch.ones(1).tanh(), rtol=0, atol=0)


def test_the_next_failing_call_frees_what_was_left() -> None:
    scene = Scene()
    scene.fail()
    scene.fail()
    assert scene.skips[0].expired()


def test_what_was_left_is_freed_with_the_model() -> None:
    scene = Scene()
    scene.fail()
    del scene.model
    assert scene.skips[0].expired()


def test_a_freed_model_removes_no_skip_of_an_equal_one() -> None:
    """Copies share namespaces, so a copy that is called after a fault has the same skip in flight."""
    gone = nn.Sequential(Stash(), Apply(lambda x: x))
    gone(torch.zeros(1))
    model = nn.Sequential(Stash(lambda x: x + 1), Apply(lambda x: x), Pop(lambda x, skip: skip))
    x = model[1](model[0](torch.zeros(1)))
    del gone
    assert model[2](x).item() == 1
