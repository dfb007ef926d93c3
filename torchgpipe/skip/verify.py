"""Check that the stashes and pops of a model match, before anything runs."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from torch import nn

from torchgpipe.skip.layout import skips_of
from torchgpipe.skip.namespace import SkipKey

__all__ = ["verify_skippables"]


def verify_skippables(module: nn.Module) -> None:
    """Check that every skip of a model is stashed once and then popped once. ::

        verify_skippables(nn.Sequential(Stash(), Middle(), Pop()))

    A layer's skips are those of all modules in it. The constructor of :class:`~torchgpipe.GPipe` runs this check.

    Args:
        module: a module whose children are the layers, in order

    Raises:
        TypeError: some skips are not; the message lists all of them, with a remedy for each.
    """
    layers = [_skippables(index, *layer) for index, layer in enumerate(module.named_children())]
    later = {key: end for ends in layers for end in ends for key in end.stashes}
    faults: list[str] = []
    stashed: dict[SkipKey, _End] = {}
    popped: set[SkipKey] = set()

    for ends in layers:
        for end in ends:
            for key in end.stashes & end.pops:
                faults.append(
                    f"'{end.path}' declared '{key.name}' both as stashable and as poppable ({end.what}); "
                    "use two names, or a variable"
                )
            for key in end.stashes:
                if key in stashed:
                    faults.append(
                        f"'{end.path}' redeclared '{key.name}' as stashable but not isolated by namespace "
                        f"({end.what}), after '{stashed[key].path}'; isolate each pair: layer.isolate(Namespace())"
                    )
                stashed.setdefault(key, end)
        for end in ends:
            for key in end.pops:
                if key not in stashed:
                    hint = (
                        f"'{later[key].path}' stashes it only afterwards; change their order"
                        if key in later
                        else "stash it in an earlier layer, in the same namespace"
                    )
                    faults.append(
                        f"'{end.path}' declared '{key.name}' as poppable but it was not stashed ({end.what}); {hint}"
                    )
                elif key in popped:
                    faults.append(
                        f"'{end.path}' redeclared '{key.name}' as poppable but not isolated by namespace "
                        f"({end.what}); a skip is popped once, so stash it again under another name, or isolate each "
                        "pair: layer.isolate(Namespace())"
                    )
                popped.add(key)

    for key, end in stashed.items():
        if key not in popped:
            faults.append(
                f"no module declared '{key.name}' as poppable but stashed by '{end.path}' ({end.what}); pop it in a "
                "later layer, in the same namespace, or do not stash it"
            )
    if faults:
        raise TypeError("stashes and pops of the model do not match:\n\n" + "\n".join(f"* {fault}" for fault in faults))


class _End(NamedTuple):
    """The skips of one module.

    Attributes:
        path: the name of the module in the model
        what: the index of its layer, and its class
        stashes: the skips that it stashes
        pops: the skips that it pops
    """

    path: str
    what: str
    stashes: Set[SkipKey]
    pops: Set[SkipKey]


def _skippables(index: int, name: str, layer: nn.Module) -> list[_End]:
    return [
        _End(
            path,
            f"layer {index}, {type(module).__name__}",
            # Dicts, which are sets with an order.
            dict.fromkeys(skips_of([module], "stashable_names")).keys(),
            dict.fromkeys(skips_of([module], "poppable_names")).keys(),
        )
        for path, module in layer.named_modules(prefix=name)
    ]
