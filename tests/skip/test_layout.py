"""The layout of skips: which skips leave and arrive in each partition."""

from __future__ import annotations

import pytest
from torch import nn

from tests.skip.layers import Pop, Stash, pair
from torchgpipe.skip import Namespace, Skippable, skippable
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout, is_skippable, skips_of
from torchgpipe.skip.namespace import SkipKey

A, B, C = [SkipKey(None, name) for name in "abc"]


def test_a_skip_leaves_one_partition_and_arrives_in_another() -> None:
    layout = SkipLayout(stashed=[[A], [B], [], []], popped=[[], [], [B], [A]])
    assert layout.leaving == [[(A, 0, 3)], [(B, 1, 2)], [], []]
    assert layout.arriving == [[], [], [(B, 1, 2)], [(A, 0, 3)]]


def test_a_skip_within_a_partition_neither_leaves_nor_arrives() -> None:
    layout = SkipLayout(stashed=[[A, B], [C]], popped=[[A], [B, C]])
    assert layout.leaving == [[(B, 0, 1)], []]
    assert layout.arriving == [[], [(B, 0, 1)]]


def test_several_from_one_to_another_are_in_one_order_at_both_ends() -> None:
    layout = SkipLayout(stashed=[[A, B, C], []], popped=[[], [C, A, B]])
    assert layout.leaving[0] == layout.arriving[1]


@pytest.mark.parametrize(
    ("stashed", "popped", "message"),
    [
        ([[], []], [[], [A]], "'a' is popped in partition 1, but not stashed; layers were replaced"),
        ([[], [A]], [[A], []], "'a' is popped in partition 0, but stashed in partition 1; layers were replaced"),
    ],
)
def test_skips_that_no_longer_match_are_refused(
    stashed: list[list[SkipKey]], popped: list[list[SkipKey]], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        SkipLayout(stashed, popped)


def test_skips_of_modules_are_found_wherever_they_are() -> None:
    a, b = pair(), pair()
    block = nn.Sequential(nn.Linear(1, 1), nn.Sequential(b[0], b[1]), a[1])
    layout = inspect_skip_layout([list(nn.Sequential(a[0]).modules()), list(block.modules())])
    (leaving,) = layout.leaving[0]
    assert leaving == (a[0].skip_key("skip"), 0, 1)
    assert layout.arriving == [[], [leaving]] and layout.leaving[1] == []


def test_skips_of_a_module_are_in_its_namespaces() -> None:
    @skippable(pop=["b", "a"])
    class Layer(Skippable, nn.Module):
        pass

    ns = Namespace()
    layer = Layer().isolate(ns, only=["a"])
    assert list(skips_of([layer, nn.Identity()], "poppable_names")) == [SkipKey(ns, "a"), SkipKey(None, "b")]
    assert list(skips_of([layer], "stashable_names")) == []


def test_is_skippable() -> None:
    assert is_skippable(Stash()) and is_skippable(Pop()) and not is_skippable(nn.Sequential(Stash()))
