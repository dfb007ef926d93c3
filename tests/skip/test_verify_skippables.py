"""All faults in the skips of a model are reported at once, before anything runs, with the next move."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Pipe
from tests.skip.layers import Pop, Stash, pair
from torchgpipe.skip import Namespace, skippable, verify_skippables


@skippable(stash=["skip"], pop=["skip"])
class Both(nn.Module):
    pass


@skippable(stash=["b", "a"])
class StashTwo(nn.Module):
    pass


def isolated(layer: Any) -> nn.Module:
    result: nn.Module = layer.isolate(Namespace())
    return result


HEADING = "stashes and pops of the model do not match:"
POP_LATER = "pop it in a later layer, in the same namespace, or do not stash it"
STASH_EARLIER = "stash it in an earlier layer, in the same namespace"
ISOLATE = "isolate each pair: layer.isolate(Namespace())"

#: For each fault, a model and the message.
FAULTS: dict[str, tuple[nn.Sequential, list[str]]] = {
    "never popped": (
        nn.Sequential(nn.Identity(), Stash()),
        [f"no module declared 'skip' as poppable but stashed by '1' (layer 1, Stash); {POP_LATER}"],
    ),
    "never stashed": (
        nn.Sequential(nn.Identity(), Pop()),
        [f"'1' declared 'skip' as poppable but it was not stashed (layer 1, Pop); {STASH_EARLIER}"],
    ),
    "popped before it is stashed": (
        nn.Sequential(Pop(), Stash()),
        [
            "'0' declared 'skip' as poppable but it was not stashed (layer 0, Pop); '1' stashes it only afterwards; "
            "change their order"
        ],
    ),
    "stashed twice": (
        nn.Sequential(Stash(), Stash(), Pop()),
        [f"'1' redeclared 'skip' as stashable but not isolated by namespace (layer 1, Stash), after '0'; {ISOLATE}"],
    ),
    "popped twice": (
        nn.Sequential(Stash(), Pop(), Pop()),
        [
            "'2' redeclared 'skip' as poppable but not isolated by namespace (layer 2, Pop); a skip is popped once, so "
            f"stash it again under another name, or {ISOLATE}"
        ],
    ),
    "stashed and popped by one layer": (
        nn.Sequential(Both()),
        ["'0' declared 'skip' both as stashable and as poppable (layer 0, Both); use two names, or a variable"],
    ),
    "in the order of layers, then what is never popped": (
        nn.Sequential(
            isolated(Stash()), StashTwo(), Pop(), nn.Sequential(nn.Identity(), nn.Sequential(isolated(Both())))
        ),
        [
            f"'2' declared 'skip' as poppable but it was not stashed (layer 2, Pop); {STASH_EARLIER}",
            "'3.1.0' declared 'skip' both as stashable and as poppable (layer 3, Both); use two names, or a variable",
            f"no module declared 'skip' as poppable but stashed by '0' (layer 0, Stash); {POP_LATER}",
            f"no module declared 'a' as poppable but stashed by '1' (layer 1, StashTwo); {POP_LATER}",
            f"no module declared 'b' as poppable but stashed by '1' (layer 1, StashTwo); {POP_LATER}",
        ],
    ),
}


def test_nothing_wrong() -> None:
    """Pairs may nest and cross, and one may have no namespace."""
    a, b = pair(), pair()
    verify_skippables(nn.Sequential())
    verify_skippables(nn.Sequential(nn.Sequential(*a), nn.Sequential(*b)))
    verify_skippables(nn.Sequential(a[0], b[0], b[1], a[1]))
    verify_skippables(nn.Sequential(a[0], Stash(), b[0], a[1], b[1], Pop()))


@pytest.mark.parametrize(("model", "faults"), FAULTS.values(), ids=list(FAULTS))
def test_each_fault_also_when_a_pipeline_is_made(model: nn.Sequential, faults: list[str], pipe: Pipe) -> None:
    with pytest.raises(TypeError) as info:
        verify_skippables(model)
    assert str(info.value) == "\n".join([HEADING, "", *[f"* {fault}" for fault in faults]])
    with pytest.raises(TypeError, match=re.escape(faults[0])):
        pipe(model, [len(model)])


def test_layers_that_no_longer_match_are_an_error_at_the_call(pipe: Pipe) -> None:
    """Layers may be replaced or isolated after the model was wrapped."""
    model = pipe(nn.Sequential(Stash(), nn.Identity(), Pop()), [1, 1, 1], chunks=2)
    x = torch.ones(2, 1)
    expected = model(x)
    model[2].isolate(Namespace())  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"partition 2, but not stashed; .* verify_skippables\(model\) tells"):
        model(x)
    with pytest.raises(TypeError, match="'2' declared 'skip' as poppable but it was not stashed"):
        verify_skippables(model)
    setattr(model, "2", nn.Identity())
    setattr(model, "0", Pop())
    setattr(model, "1", Stash())
    with pytest.raises(TypeError, match="'skip' is popped in partition 0, but stashed in partition 1"):
        model(x)
    setattr(model, "0", Stash())
    setattr(model, "1", Pop())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
