"""All faults in the skips of a model are reported at once, before anything runs, with the next move."""

from __future__ import annotations

import copy
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

#: For each fault, a model and the message.
FAULTS: dict[str, tuple[nn.Sequential, list[str]]] = {
    "never popped": (
        nn.Sequential(nn.Identity(), Stash()),
        [
            "no module declared 'skip' as poppable but stashed by '1' (layer 1, Stash); pop it in a later layer, in "
            "the same namespace, or do not stash it"
        ],
    ),
    "never stashed": (
        nn.Sequential(nn.Identity(), Pop()),
        [
            "'1' declared 'skip' as poppable but it was not stashed (layer 1, Pop); stash it in an earlier layer, in "
            "the same namespace"
        ],
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
        [
            "'1' redeclared 'skip' as stashable but not isolated by namespace (layer 1, Stash), after '0'; isolate "
            "each pair: layer.isolate(Namespace())"
        ],
    ),
    "popped twice": (
        nn.Sequential(Stash(), Pop(), Pop()),
        [
            "'2' redeclared 'skip' as poppable but not isolated by namespace (layer 2, Pop); a skip is popped once, so "
            "stash it again under another name, or isolate each pair: layer.isolate(Namespace())"
        ],
    ),
    "stashed and popped by one layer": (
        nn.Sequential(Both()),
        ["'0' declared 'skip' both as stashable and as poppable (layer 0, Both); use two names, or a variable"],
    ),
    "one end isolated": (
        nn.Sequential(isolated(Stash()), Pop()),
        [
            "'1' declared 'skip' as poppable but it was not stashed (layer 1, Pop); stash it in an earlier layer, in "
            "the same namespace",
            "no module declared 'skip' as poppable but stashed by '0' (layer 0, Stash); pop it in a later layer, in "
            "the same namespace, or do not stash it",
        ],
    ),
    "in a block": (
        nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), nn.Sequential(Both(), Stash()))),
        [
            "'1.1.0' declared 'skip' both as stashable and as poppable (layer 1, Both); use two names, or a variable",
            "'1.1.1' redeclared 'skip' as stashable but not isolated by namespace (layer 1, Stash), after '1.1.0'; "
            "isolate each pair: layer.isolate(Namespace())",
        ],
    ),
    "several names": (
        nn.Sequential(StashTwo()),
        [
            f"no module declared '{name}' as poppable but stashed by '0' (layer 0, StashTwo); pop it in a later layer, "
            "in the same namespace, or do not stash it"
            for name in "ab"
        ],
    ),
}


def test_all_faults_at_once() -> None:
    """Each fault is reported once, in the order of the layers; skips that are never popped come last."""
    blocks = []
    for model, _ in copy.deepcopy(list(FAULTS.values())):
        ns: dict[Any, Namespace] = {}
        for module in model.modules():
            if hasattr(module, "isolate"):
                key = module.skip_key(sorted(module.stashable_names | module.poppable_names)[0])
                module.isolate(ns.setdefault(key.namespace, Namespace()))
        blocks += list(model)
    with pytest.raises(TypeError) as info:
        verify_skippables(nn.Sequential(*blocks))
    lines = str(info.value).splitlines()[2:]
    assert len(lines) == sum(len(faults) for _, faults in FAULTS.values())
    assert all(line.startswith("* ") for line in lines)
    layers = [int(re.search(r"layer (\d+), ", line)[1]) for line in lines]  # type: ignore[index]
    first, last = [
        [k for k, line in zip(layers, lines) if line.startswith("* no module") is end] for end in (False, True)
    ]
    assert first == sorted(first) and last == sorted(last) and layers == first + last


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
