"""Varying the sample for a proof: rows of equal content hide whatever couples rows, and even labels what weighs them.

What people give for a sample is often ``torch.ones(4, 8)``, or one row. So a row that occurred before is varied: floats
by noise, integers by those of other places, or others up to the largest. Some tensors have equal rows by nature, such
as the ids of positions; and there is no telling whether a tensor of zeros and ones says which positions count. These
stay, unless nothing else can be varied. Masks stay as they are.

Labels that a loss leaves out are put in unevenly, where a row has several, so that the means over rows, over labels,
and over the labels that models compare with (all but the first of each row) differ:

    row of micro-batch 0    the labels in places 0 and 1; then only the label in place 0
    row of micro-batch 1    the label in place 1; then only the label in place 2

Labels of one class, as of ``torch.zeros``, hide that classes have weights: micro-batch 1 gets those of another class.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchgpipe.frames.inputs import Arguments, Splitter, varied

__all__ = ["variations"]


def variations(splitter: Splitter, sample: Arguments, labels: tuple[str, int]) -> list[Arguments]:
    """Return variations of a sample, those that show most first: a model may not take all of them.

    Args:
        splitter: tells what is split
        sample: the arguments, of as many rows as the proof needs
        labels: the argument whose labels a loss of the model counts, and the label that it leaves out

    Raises:
        ValueError: the rows are equal, and cannot be varied.
    """
    sample = _with_different_rows(splitter, sample)
    if labels[0] not in splitter.names(sample):
        return [sample]
    return [splitter.changed(sample, partial(_unevenly, *labels)), sample]


def _with_different_rows(splitter: Splitter, sample: Arguments) -> Arguments:
    differ: dict[str, bool] = {}

    def change(path: str, tensor: Tensor, readily: bool) -> Tensor:
        new = _varied(tensor) if _may_vary(path, tensor, splitter.rows, readily=readily) else tensor
        differ[path] = tensor.is_meta or bool((new != new[:1]).any())
        return new

    for readily in (True, False):
        result = splitter.changed(sample, partial(change, readily=readily))
        if not differ or any(differ.values()):
            return result
    raise ValueError(
        f"all rows of the sample are equal in {[*differ]}, and cannot be varied, so they do not show whether the model "
        "couples rows; give a sample whose rows differ (verify=False skips the comparison, and results may be wrong)"
    )


def _may_vary(path: str, tensor: Tensor, rows: int, *, readily: bool) -> bool:
    """Return whether to vary rows of a tensor that are equal.

    Args:
        path: the path of the tensor among the arguments
        tensor: the tensor
        rows: the rows of the sample as it was given
        readily: whether to leave alone what may have equal rows by nature, and what may be a mask
    """
    if tensor.dtype is torch.bool or "mask" in path or tensor.is_meta or not tensor.numel():
        return False
    if not readily:
        return True
    is_mask = not tensor.is_floating_point() and bool((tensor == tensor.bool()).all())
    is_constant = bool((tensor == tensor.reshape(-1)[0]).all())
    # Of a single row, nobody can tell.
    return not is_mask and (rows == 1 or is_constant or bool((tensor != tensor[:1]).any()))


def _varied(tensor: Tensor) -> Tensor:
    """Return a tensor whose rows differ: each that occurred before is varied by how often it did."""
    rows = list(tensor.detach())
    counts = [sum([torch.equal(row, other) for other in rows[:k]]) for k, row in enumerate(rows)]
    if not any(counts):
        return tensor
    largest = 0 if tensor.is_floating_point() or tensor.is_complex() else int(tensor.max())
    new = torch.stack([varied(row, count, largest) for row, count in zip(rows, counts)])
    return new.requires_grad_(tensor.requires_grad)


def _unevenly(name: str, ignored: int, path: str, tensor: Tensor) -> Tensor:
    """Return labels of which few count, in places that tell the rules of means apart."""
    if path != name or tensor.is_meta:
        return tensor
    half = (len(tensor) + 1) // 2
    tensor = _of_two_classes(tensor, ignored, half)
    if tensor.dim() < 2:
        return tensor
    labels = tensor.reshape(len(tensor), -1)
    counts = torch.zeros_like(labels, dtype=torch.bool)
    for k, row in enumerate(labels):
        first, later = [0] if row[0] != ignored else [], (row[1:] != ignored).nonzero().flatten().tolist()
        if len(later) < 2:  # The sample has too few labels that count.
            return tensor
        kept = [*first, 1 + later[0]] if k == 0 else first if k < half else []
        counts[k, kept or [1 + later[k > half]]] = True
    return torch.where(counts, labels, ignored).reshape(tensor.shape)


def _of_two_classes(labels: Tensor, ignored: int, half: int) -> Tensor:
    """Return labels that are of another class in the rows from ``half`` on, if all are of one class."""
    classes = torch.unique(labels[labels != ignored])
    if len(classes) != 1 or labels.is_floating_point():
        return labels
    other = labels.clone()
    other[half:] = int(classes) - 1 if classes else 1
    return torch.where(labels == ignored, labels, other)
