"""The layout of skips: which skips leave and arrive in each partition."""

from __future__ import annotations

import pytest
from torch import nn

from tests.skip.layers import pair
from torchgpipe.skip import Namespace, Skippable, skippable
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout, skips_of
from torchgpipe.skip.namespace import SkipKey

A, B, C = [SkipKey(None, name) for name in "abc"]


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
