"""Tensors that a layer keeps for itself: those of the next micro-batch, once that has reached the layer.

A layer may change such a tensor in place for each micro-batch, and return it. In a plain model the tensor is used
before the next micro-batch starts. Here the next one starts while this one waits for its turn in a later partition, so
a cell returns a copy. A pipelined model of another class is refused instead, by its proof.
"""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor, nn

from torchgpipe.devices.torch_internals import storage_key, versions
from torchgpipe.model.untouched import attributes

__all__ = ["copy_of_state", "may_be_state", "memory_of_state", "note_changes"]


def may_be_state(tensor: Tensor) -> bool:
    """Return whether a tensor may be one that a layer keeps: hardly any is, as it has no graph, but has changed."""
    return not tensor.requires_grad and versions([tensor]) != [0]


def memory_of_state(module: nn.Module) -> Set[int]:
    """Return what tells the memory of the tensors that the layers of a module keep; walks all their attributes."""
    return {storage_key(tensor) for tensor in (*module.buffers(), *[tensor for *_, tensor in attributes(module)])}


def copy_of_state(memory: Set[int], tensor: Tensor) -> Tensor:
    """Return a tensor that layers have returned, or a copy if a layer keeps it and has changed it in place.

    Args:
        memory: the memory that layers keep
        tensor: a tensor among what they have returned
    """
    return tensor.clone() if may_be_state(tensor) and storage_key(tensor) in memory else tensor


def note_changes(error: BaseException) -> None:
    """Add to PyTorch's error for a tensor that backward needs, but that has changed, which one it may be."""
    if "modified by an inplace operation" in str(error):
        error.add_note(
            "a layer may keep this tensor, such as a buffer, and change it for the next micro-batch: let the layer "
            "compute with a copy (self.scale.clone()), or let it run again at backward, with checkpoint"
        )
