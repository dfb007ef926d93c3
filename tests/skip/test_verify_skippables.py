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


#: For each fault, a model and the message, with the next move at its end.
FAULTS: dict[str, tuple[nn.Sequential, list[str]]] = {
    "never popped": (nn.Sequential(Stash()), ["no module declared 'skip' .* by '0' .*pop it in a later layer"]),
    "never stashed": (nn.Sequential(Pop()), ["'0' declared 'skip' as poppable .*stash it in an earlier layer"]),
    "popped before": (
        nn.Sequential(Pop(), Stash()),
        ["'0' declared .* '1' stashes it only afterwards; change their order"],
    ),
    "stashed twice": (
        nn.Sequential(Stash(), Stash(), Pop()),
        [r"'1' redeclared 'skip' as stashable .*, after '0'; isolate each pair: layer\.isolate\(Namespace\(\)\)"],
    ),
    "popped twice": (nn.Sequential(Stash(), Pop(), Pop()), ["'2' redeclared 'skip' as poppable .* isolate each pair"]),
    "both": (nn.Sequential(Both()), [r"'0' declared .* both .*\(layer 0, Both\); use two names"]),
    "in the order of layers, then what is never popped": (
        nn.Sequential(
            isolated(Stash()), StashTwo(), Pop(), nn.Sequential(nn.Identity(), nn.Sequential(isolated(Both())))
        ),
        [
            r"'2' declared 'skip' as poppable but it was not stashed \(layer 2, Pop\)",
            r"'3\.1\.0' declared 'skip' both as stashable and as poppable \(layer 3, Both\)",
            r"no module declared 'skip' as poppable but stashed by '0' \(layer 0, Stash\)",
            r"no module declared 'a' as poppable but stashed by '1' \(layer 1, StashTwo\)",
            r"no module declared 'b' as poppable but stashed by '1' \(layer 1, StashTwo\)",
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
    told = str(info.value).splitlines()[2:]
    assert len(told) == len(faults) and all(map(re.match, [rf"\* {fault}" for fault in faults], told))
    with pytest.raises(TypeError, match=faults[0]):
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
