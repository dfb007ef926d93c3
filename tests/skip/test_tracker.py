"""A tracker holds each skip until its pop, also in plain models, which no pipeline runs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.layers import Apply
from tests.skip.layers import Pop, Stash, pair

# A plain model that fails between a stash and its pop. The thread's tracker is not notified.


def test_what_was_left_is_freed_by_the_next_call_and_with_the_model() -> None:
    skips: list[StorageWeakRef] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        skip = x + 1
        skips.append(StorageWeakRef(skip.untyped_storage()))
        return skip

    def middle(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ZeroDivisionError
        return x

    def call(alive: list[bool]) -> None:
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            assert torch.equal(model(torch.zeros(1)), torch.ones(1).tanh())
        assert [not skip.expired() for skip in skips] == alive

    fails: list[None] = [None]
    stashing, popping = pair(make)
    model = nn.Sequential(stashing, Apply(middle), popping)
    call([True])
    call([False, True])
    fails.pop()
    call([False, False, False])
    fails.append(None)
    call([False, False, False, True])
    model = None  # type: ignore[assignment]
    del stashing, popping
    assert skips[-1].expired()


def test_a_freed_model_removes_no_skip_of_an_equal_one() -> None:
    """Copies share namespaces, so a copy that is called after a fault has the same skip in flight."""
    gone = nn.Sequential(Stash(), Apply(lambda x: x))
    gone(torch.zeros(1))
    model = nn.Sequential(Stash(lambda x: x + 1), Apply(lambda x: x), Pop(lambda x, skip: skip))
    x = model[1](model[0](torch.zeros(1)))
    del gone
    assert model[2](x).item() == 1
