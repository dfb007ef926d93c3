"""Tensors that a module keeps for itself: those of the next micro-batch, once that has come to the module.

A module may change such a tensor in place for each micro-batch, and return it. In a plain model the tensor is used
before the next micro-batch comes. Here the next one comes while this one waits for its turn in a later partition, so
what is returned is a copy.
"""

from __future__ import annotations

from torch import Tensor, nn

from torchgpipe.devices.torch_internals import storage_key, versions
from torchgpipe.model.untouched import attributes

__all__ = ["apart", "may_be_state", "note_changes"]


def may_be_state(tensor: Tensor) -> bool:
    """Return whether a tensor may be one that a module keeps: hardly any is, as it has no graph, but has changed."""
    return not tensor.requires_grad and versions([tensor]) != [0]


def apart(module: nn.Module, tensor: Tensor) -> Tensor:
    """Return a tensor that a module has returned, or a copy if the module keeps it and has changed it in place.

    Args:
        module: the module
        tensor: a tensor among what it has returned
    """
    if not may_be_state(tensor):
        return tensor
    memory = storage_key(tensor)
    owned = [*module.buffers(), *[tensor for _, _, tensor in attributes(module)]]
    return tensor.clone() if any([storage_key(tensor) == memory for tensor in owned]) else tensor


def note_changes(error: BaseException) -> None:
    """Add to PyTorch's error for a tensor that backward needs, but that has changed, which one it may be."""
    if "modified by an inplace operation" in str(error):
        error.add_note(
            "a layer may keep this tensor, such as a buffer, and change it for the next micro-batch: let the layer "
            "compute with a copy (self.scale.clone()), or let it run again at backward, with checkpoint"
        )
