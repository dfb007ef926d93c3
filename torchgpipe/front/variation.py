"""Varying the sample for a proof: rows of equal content hide whatever couples rows, and even labels what weighs them.

What people give for a sample is often ``torch.ones(4, 8)``, or one row. So a row that occurred before is varied: floats
by noise, integers by drawing from those of the row, or up to the largest. Some tensors have equal rows by nature, such
as the ids of positions. These stay, unless nothing else can be varied. A tensor of zeros and ones may say which places
count, whatever its name, so it leaves out places of the last row, as the masks of batches do.

Labels that a loss leaves out are put in unevenly, where a row has several, so that the means over rows, over labels,
and over the labels that models compare with (all but the first of each row) differ:

    row of micro-batch 0    the labels in places 0 and 1; then only the label in place 0
    row of micro-batch 1    the label in place 1; then only the label in the last place

Labels of one class, as of ``torch.zeros``, hide that classes have weights: micro-batch 1 gets those of another class.
One label is 0, and in another variation all that are left out: a model may leave out its padding by itself.

A model may not take all of this: lengths are no lengths any more, or rows lose their first word. So milder variations
follow, in which rows are rolled, and single integers stay. A model may compute shapes of integers, such as the sizes of
images. So in the mildest one, all integers stay, if floats can be varied.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchgpipe.batch.inputs import Arguments, Splitter, vary_row

__all__ = ["vary_sample"]


def vary_sample(
    splitter: Splitter, sample: Arguments, labels: tuple[str, int], *, must_differ: bool = True
) -> list[list[Arguments]]:
    """Return variations of a sample, those that show most first: a model may not take all of them.

    They are together that vary the rows in the same way, and the labels in another one.

    Args:
        splitter: tells what is split
        sample: the arguments, of as many rows as the proof needs
        labels: the argument whose labels a loss of the model counts, and the label that it leaves out
        must_differ: whether rows must differ

    Raises:
        ValueError: the rows are equal, and cannot be varied.
    """
    name, ignored = labels
    result = []
    for mildly, integers in ((False, True), (True, True), (True, False)):
        other = _with_different_rows(splitter, sample, mildly, integers)
        if other is None:
            if must_differ:
                continue
            other = sample
        uneven = [splitter.changed(other, partial(_unevenly, name, one)) for one in dict.fromkeys((ignored, 0))]
        result.append([*uneven, other] if name in splitter.tensors(sample) else [other])
    if result:
        return result
    raise ValueError(
        f"all rows of the sample are equal in {[*splitter.tensors(sample)]}, and cannot be varied, so they do not show "
        f"whether the model couples rows ({splitter.decisions()}); give a sample whose rows differ, or no_chunk= what "
        "has no rows (verify=False skips the comparison, and results may be wrong)"
    )


def _with_different_rows(splitter: Splitter, sample: Arguments, mildly: bool, integers: bool) -> Arguments | None:
    """Return a sample whose rows differ, those of integers only if ``integers``; None if the rows cannot be varied."""
    differ: dict[str, bool] = {}

    def change(path: str, tensor: Tensor, readily: bool) -> Tensor:
        may = (integers or tensor.is_floating_point()) and _may_vary(path, tensor, splitter.rows, readily=readily)
        new = _varied(tensor, mildly) if may else tensor
        differ[path] = tensor.is_meta or bool((new != new[:1]).any())
        # It may say which places count. What has one integer for each row has been varied already.
        counts = tensor.dtype is torch.bool or path.endswith("mask") or not (new.is_floating_point() or new.dim() == 1)
        return _padded(new) if counts and not mildly else new

    for readily in (True, False):
        result = splitter.changed(sample, partial(change, readily=readily))
        if not differ or any(differ.values()):
            return result
    return None


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
    if not tensor.is_floating_point() and tensor.dim() > 1 and bool((tensor == tensor.bool()).all()):
        return False
    is_constant = bool((tensor == tensor.reshape(-1)[0]).all())
    # A single row does not tell. Positions are whole numbers.
    return rows == 1 or is_constant or bool((tensor != tensor[:1]).any()) or bool((tensor != tensor.round()).any())


def _varied(tensor: Tensor, mildly: bool) -> Tensor:
    """Return a tensor whose rows differ: each that occurred before is varied by how often it did."""
    rows = list(tensor.detach())
    counts = [sum([torch.equal(row, other) for other in rows[:k]]) for k, row in enumerate(rows)]
    if not any(counts):
        return tensor
    if tensor.dim() == 1 and not tensor.is_floating_point() and not tensor.is_complex():
        return tensor if mildly else _uneven_classes(tensor.detach())
    largest = 0 if tensor.is_floating_point() or tensor.is_complex() else max(1, int(tensor.max()))
    new = torch.stack([vary_row(row, count, largest, mildly=mildly) for row, count in zip(rows, counts)])
    return new.requires_grad_(tensor.requires_grad)


def _uneven_classes(numbers: Tensor) -> Tensor:
    """Return integers, such as classes or lengths, the largest of which only the first micro-batch has."""
    values = sorted({*numbers.tolist()})
    if len(values) > 2:
        return numbers
    largest = max(values[-1], 1)
    # A length of 0 is none.
    other = values[0] if len(values) > 1 else largest - 1
    result = torch.full_like(numbers, other)
    result[1] = largest
    return result


def _padded(mask: Tensor) -> Tensor:
    """Return a mask that leaves out the end of the last row, if that is like another one."""
    if mask.is_meta or not mask.numel() or not (mask == mask.bool()).all():
        return mask
    half = (mask[0].numel() + 1) // 2 if mask.dim() > 1 else 0
    rows = mask.detach().reshape(len(mask), -1)
    if not rows[-1, : half or 1].any() or not (rows[:-1] == rows[-1]).all(1).any():
        return mask
    rows = rows.clone()
    rows[-1, half:] = 0
    return rows.reshape(mask.shape)


def _unevenly(name: str, ignored: int, path: str, tensor: Tensor) -> Tensor:
    """Return labels of which few count, in places that tell the rules of means apart."""
    if path != name or tensor.is_meta:
        return tensor
    half = (len(tensor) + 1) // 2
    tensor = _of_two_classes(tensor, ignored, half)
    known = tensor[tensor != ignored]
    if tensor.dim() < 2 or tensor[0].numel() < 2 or not len(known):
        return tensor
    labels = tensor.reshape(len(tensor), -1).clone()
    counts = torch.zeros_like(labels, dtype=torch.bool)
    for k, row in enumerate(labels):
        # Drawn from one row, most labels of another may be those that are left out.
        row[1] = known[-(k >= half)] if (row[1:] == ignored).all() else row[1]
        first, *_, last = [1 + place for place in (row[1:] != ignored).nonzero().flatten().tolist() * 2]
        row[0] = row[first] if row[0] == ignored else row[0]
        counts[k, [0, first] if k == 0 else 0 if k < half else last if k > half else first] = True
        if ignored and k == 0:
            row[first] = 0
    return torch.where(counts, labels, ignored).reshape(tensor.shape)


def _of_two_classes(labels: Tensor, ignored: int, half: int) -> Tensor:
    """Return labels that are of one class in the first rows, and of another one in the rows from ``half`` on.

    If classes weigh differently, the means over labels and over their weights differ. Of labels of several classes as
    they come, the few that count may weigh the same in both halves.
    """
    classes = torch.unique(labels[labels != ignored])
    if not len(classes) or labels.is_floating_point():
        return labels
    first, last = int(classes[0]), int(classes[-1])
    other = torch.full_like(labels, first)
    other[half:] = last if last != first else first - 1 if first else 1
    return torch.where(labels == ignored, labels, other)
