"""Tensors that a module keeps for itself: those of the next micro-batch, once that has come to the module.

A module may change such a tensor in place for each micro-batch, and return it. In a plain model the tensor is used
before the next micro-batch comes. Here the next one comes while this one waits for its turn in a later column, so what
is returned is a copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchgpipe.devices.torch_internals import storage_key, versions
from torchgpipe.model.untouched import attributes
from torchgpipe.model.values import mapped

__all__ = ["apart"]


def apart(module: nn.Module, output: Any) -> Any:
    """Return the output of a module, with copies of the tensors in it that the module keeps and changes in place.

    Args:
        module: the module
        output: what it has returned
    """

    def change(tensor: Tensor) -> Tensor:
        # Nearly all outputs have a graph, or were not changed in place: the modules need not be looked at.
        if tensor.requires_grad or versions([tensor]) == [0]:
            return tensor
        kept = [*module.buffers(), *[one for _, _, one in attributes(module)]]
        memory = storage_key(tensor)
        return tensor.clone() if any([storage_key(one) == memory for one in kept]) else tensor

    return mapped(output, change)
