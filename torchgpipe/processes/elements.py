"""The elements of a tensor in the order of its memory, as they are sent, and the tensor that is made of them again.

A tensor arrives with its strides, and begins as far behind a multiple of 64 bytes as before: products and sums are
rounded by both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchgpipe.processes.stand_in import Form

__all__ = ["ALIGNMENT", "elements_of", "from_elements", "sent_shape", "shift_of"]

#: Memory of tensors begins at multiples of so many bytes.
ALIGNMENT = 64


def shift_of(tensor: Tensor) -> int:
    """Return how many elements behind a multiple of 64 bytes a tensor begins: the CPU rounds some sums by that."""
    return tensor.storage_offset() * tensor.itemsize % ALIGNMENT // tensor.itemsize


def elements_of(tensor: Tensor) -> Tensor:
    """Return what is sent of a tensor: its elements in the order of its memory, each once."""
    for d in range(tensor.dim()):
        if tensor.stride(d) == 0 and tensor.shape[d]:
            tensor = tensor.narrow(d, 0, 1)
    if not _is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def from_elements(flat: Tensor, form: Form) -> Tensor:
    """Return a tensor of this form with elements that `elements_of` has given.

    It has the strides, too, or products would be rounded in another way; but for one that overlaps itself.
    """
    shape = sent_shape(form)
    if _is_dense(shape, form.stride):
        return flat.as_strided(shape, form.stride).expand(form.shape)
    tensor = flat.view(shape)
    if _is_apart(shape, form.stride):
        shift, extent = shift_of(flat), 1 + sum([(size - 1) * step for size, step in zip(shape, form.stride)])
        room = torch.empty(shift + extent, dtype=form.dtype, device=form.device)
        tensor = room.as_strided(shape, form.stride, shift).copy_(tensor)
    return tensor.expand(form.shape)


def sent_shape(form: Form) -> list[int]:
    """Return the shape of what is sent of a tensor: a dimension that is expanded is sent once."""
    return [size if stride or not size else 1 for size, stride in zip(form.shape, form.stride)]


def _is_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether all elements of a tensor have places of their own."""
    extent = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1:
            if stride < extent:
                return False
            extent += stride * (size - 1)
    return True


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor fill their memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
