"""What is checked before a Sequential is split: the module, the names of its layers, and the balance."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import nn

from torchgpipe.devices.device import default_devices
from torchgpipe.model.partition import Partition

__all__ = ["verify_balance", "verify_divided", "verify_module", "verify_names"]


def verify_module(module: nn.Module) -> None:
    """Raises if ``module`` cannot be partitioned at all.

    Raises:
        TypeError: it is not an :class:`~torch.nn.Sequential`.
        ValueError: a layer occurs twice.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, but got {type(module).__name__}; write it as its layers "
            f"in the order of forward, for instance {_as_sequential(module)}, where what forward does between them is "
            'a layer as well (see "A model that is not sequential" in docs/recipes.rst)'
        )
    names: dict[int, str] = {}
    for name, layer in module._modules.items():
        first = names.setdefault(id(layer), name)
        if first != name:
            raise ValueError(
                f"module with duplicate children is not supported, but '{first}' and '{name}' are the same "
                "layer; make a copy of it, or put both uses into one layer"
            )


def _as_sequential(module: object) -> str:
    """The layers of ``module`` as one would write them in a Sequential."""
    if isinstance(module, nn.ModuleList):
        return "nn.Sequential(*model)"
    children = list(module.named_children()) if isinstance(module, nn.Module) else []
    stars = ["*" if isinstance(child, nn.Sequential | nn.ModuleList) else "" for _, child in children]
    layers = [f"{star}model.{name}" for star, (name, _) in zip(stars, children)]
    if len(layers) > 4:
        layers[2:-1] = ["..."]
    return f"nn.Sequential({', '.join(layers) or 'first, second, ...'})"


def verify_names(pipeline: nn.Module, module: nn.Sequential) -> None:
    """Raises if a layer has a name that the pipeline, or the partition that it will be in, needs for itself.

    Args:
        pipeline: with all of its own attributes, and without layers
        module: the layers

    Raises:
        ValueError: the same, with the names.
    """
    needed = {*dir(pipeline), *dir(Partition)}
    taken = [name for name in module._modules if name in needed]
    if taken:
        raise ValueError(
            f"layers cannot have the names of attributes of {type(pipeline).__name__}, but there are {taken}; rename "
            "them in the Sequential, for instance by adding an underscore"
        )


def verify_balance(balance: Iterable[int] | None, layers: int) -> list[int]:
    """The balance as a list, once it fits a module with that many layers.

    Raises:
        TypeError: it is something else than integers in a list or the like.
        ValueError: it is missing, has another sum than ``layers``, or leaves a partition empty.
    """
    if balance is None:
        raise ValueError(_recommend_balancing(f"balance is required (module: {layers} layers)", layers))
    try:
        counts = [operator.index(count) for count in balance]
    except TypeError:
        raise TypeError(
            _recommend_balancing(
                f"balance takes a list of integers, the number of layers in each partition, but got {balance!r} "
                f"(module: {layers} layers)",
                layers,
            )
        ) from None
    if any(count <= 0 for count in counts):
        raise ValueError(
            _recommend_balancing(
                f"all balance numbers must be positive integers (balance: {counts}, layers: {layers})",
                layers,
                len(counts),
            )
        )
    if sum(counts) != layers:
        raise ValueError(
            _recommend_balancing(
                f"module and sum of balance have different length (module: {layers}, sum of balance: {sum(counts)})",
                layers,
                len(counts),
            )
        )
    return counts


def _recommend_balancing(message: str, layers: int, wanted: int = 0) -> str:
    """Return ``message`` and how to get a balance.

    Args:
        message: what is wrong with the one that was given
        layers: the number of layers of the module
        wanted: the number of partitions that the caller has in mind; 0 for one on each accelerator
    """
    partitions = max(1, min(layers, wanted or max(2, len(default_devices(2)))))
    return f"""{message}

Let the balance be measured, here for {partitions} partition{"s" * (partitions > 1)}:

    from torchgpipe_balancing import balance_by_time
    balance = balance_by_time(module, sample, partitions={partitions})

(or by size; see torchgpipe_balancing, or torchgpipe.balance for the signatures of later releases)"""


def verify_divided(layers: Iterable[str], partitions: Sequence[Partition]) -> None:
    """Raises if some of the layers are in no partition, and would not run, or the other way round.

    Raises:
        RuntimeError: layers were added or deleted since they were divided.
    """
    divided = dict.fromkeys([name for partition in partitions for name in partition._modules])
    now = dict.fromkeys(layers)
    if now.keys() != divided.keys():
        added, deleted = list(now.keys() - divided.keys()), list(divided.keys() - now.keys())
        raise RuntimeError(
            "the balance of a pipeline is made for the layers that it had, but since then "
            + " and ".join(
                f"{sorted(names)} {'was' if len(names) == 1 else 'were'} {what}"
                for names, what in [(added, "added"), (deleted, "deleted")]
                if names
            )
            + "; put nn.Identity() in the place of a layer instead of deleting it, keep other modules outside, or "
            "wrap the layers again: GPipe(model.unwrap(), ...)"
        )
