"""The layout of skips: which skips leave and arrive in each partition."""

from __future__ import annotations

from torch import nn

from tests.skip.layers import pair
from torchgpipe.skip import Namespace, Skippable, skippable
from torchgpipe.skip.layout import SkipLayout, skips_of
from torchgpipe.skip.namespace import SkipKey


def test_skips_of_modules_are_found_wherever_they_are() -> None:
    a, b = pair(), pair()
    block = nn.Sequential(nn.Linear(1, 1), nn.Sequential(b[0], b[1]), a[1])
    layout = SkipLayout([list(nn.Sequential(a[0]).modules()), list(block.modules())])
    leaving = (a[0].skip_key("skip"), 0, 1)
    assert (layout.leaving, layout.arriving) == ([[leaving], []], [[], [leaving]])


def test_skips_of_a_module_are_in_its_namespaces_and_in_order() -> None:
    @skippable(pop=["b", "a"])
    class Layer(Skippable, nn.Module):
        pass

    ns = Namespace()
    layer = Layer().isolate(ns, only=["a"])
    assert list(skips_of([layer, nn.Identity()], "poppable_names")) == [SkipKey(ns, "a"), SkipKey(None, "b")]
    assert list(skips_of([layer], "stashable_names")) == []
