"""Divide the layers of a pipeline into partitions, which are views on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import islice
from typing import Any

import torch
from torch import nn

__all__ = ["Partition", "layers_of", "split"]


class Partition(nn.Sequential):
    """A view on consecutive layers of a pipeline, which owns the layers.

    Hooks and ``compile()`` work as on any module. The layers are registered on the pipeline, under the names that they
    have in the wrapped model, and are replaced there.
    """

    #: The position among all partitions. Private, or a layer could not have this name.
    _index: int

    @property
    def _running(self) -> Partition:
        """This partition; for partitions that are joined, the one of them that runs now."""
        return self

    @property
    def _label(self) -> str:
        """The index and the names of the layers, for errors."""
        names = list(self._modules)
        return f"partition {self._index} (layers '{names[0]}'..'{names[-1]}')"

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        layers = iter(self)
        # Only the first layer can have several arguments: a layer returns one value.
        value = next(layers)(*inputs, **keywords)
        for layer in layers:
            value = layer(value)
        return value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile these layers, with the arguments of :func:`torch.compile`, apart from the other partitions."""
        # All partitions share the code of forward. Counted together, they would exceed the limit of eight graphs.
        if "isolate_recompiles" in signature(torch.compile).parameters:  # since PyTorch 2.13
            kwargs.setdefault("isolate_recompiles", True)
        super().compile(*args, **kwargs)

    def follow(self, layers: Mapping[str, nn.Module], training: bool) -> None:
        """Show the layers that the owner has registered by now, and take over its training mode."""
        if self.training != training:  # To assign an attribute of a module is slow.
            self.training = training
        for name in self._modules:
            self._modules[name] = layers[name]

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if name in self._modules:
            raise TypeError(
                f"a partition is a view on the layers of its pipeline; to replace layer '{name}', set it on the "
                f"pipeline: model.set_submodule('{name}', layer)"
            )
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in self.__dict__.get("_modules", ()):
            self.add_module(name, value)
        super().__setattr__(name, value)


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a Sequential, or of the pipeline around one, by name."""
    layers: dict[str, Any] = module._modules
    return layers


def split(
    layers: Mapping[str, nn.Module], balance: Sequence[int], kind: type[Partition] = Partition
) -> list[Partition]:
    """Return views on consecutive layers, ``balance[j]`` of them in partition j."""
    rest = iter(layers.items())
    partitions = []
    for index, count in enumerate(balance):
        partition = kind()
        partition._index = index
        # Not by `add_module`, which refuses dotted names such as '0.1', of a layer inside another module.
        partition._modules.update(islice(rest, count))
        partitions.append(partition)
    return partitions
