"""Split layers into consecutive partitions, optimally, by the cost of each layer.

A pipeline is as fast as its slowest partition, so the largest load counts first. Among the splits with the smallest
largest load, the loads are to be as even as possible. `split.py` finds it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from itertools import pairwise

from torchgpipe_balancing.split import best_split, sums_between

__all__ = ["check_partitions", "partition"]


def partition(
    costs: Iterable[float],
    partitions: int | None = None,
    *,
    speeds: Iterable[float] | None = None,
    sizes: Iterable[float] | None = None,
    limits: Iterable[float] | None = None,
) -> list[int]:
    """Split layers into consecutive partitions so that the largest load is as small as possible.

    The load of a partition is the sum of its layers' costs, divided by the speed of its device. Of several splits
    with the same largest load, one with the least sum of squared loads is returned. No partition is empty. ::

        >>> partition([1, 1, 1, 9, 1, 1], 3)
        [3, 1, 2]
        >>> partition([1, 1, 1, 9, 1, 1], speeds=[1, 3])
        [3, 3]
        >>> partition([1, 1, 1, 1], sizes=[4, 1, 1, 1], limits=[4, 4])
        [1, 3]

    Args:
        costs: the cost of each of n layers, in any unit: numbers that are finite and not negative
        partitions: the number of partitions, at most n; may be left out if `speeds` or `limits` are given

    Keyword Args:
        speeds: the speed of each partition's device, relative to the others: finite numbers above zero (default:
            all are equally fast)
        sizes: the memory that each of n layers takes, in any unit: numbers that are finite and not negative
        limits: the memory of each partition's device, in the unit of `sizes`; may be infinite

    Returns:
        The number of layers in each partition, for GPipe's `balance`.

    Raises:
        ValueError: fewer layers than partitions, partitions below 1, a number out of its range, lists whose
            lengths do not match, or layers that no split fits into the limits.
    """
    cost = _floats("costs", costs)
    speed = None if speeds is None else _floats("speeds", speeds, zero=False)
    size = None if sizes is None else _floats("sizes", sizes)
    limit = None if limits is None else _floats("limits", limits, infinity=True)

    if (size is None) != (limit is None):
        raise ValueError("sizes and limits go together: give both, or neither")
    known = speed or limit
    if partitions is None and known is None:
        raise ValueError("partitions is missing: give it, or speeds or limits, one for each partition")
    n = len(known or ()) if partitions is None else partitions
    check_partitions(len(cost), n)
    for name, numbers, count, of in (
        ("speeds", speed, n, "partitions"),
        ("sizes", size, len(cost), "layers"),
        ("limits", limit, n, "partitions"),
    ):
        if numbers is not None and len(numbers) != count:
            raise ValueError(f"{name} has {len(numbers)} numbers, for {count} {of}")

    slowness = [max(speed) / factor for factor in speed] if speed else [1.0] * n
    sums = sums_between(size or [])
    cuts = best_split(cost, slowness, None if limit is None else [sums <= room for room in limit])
    if cuts is None:
        raise ValueError(f"sizes do not fit into limits: {_misfit(size or [], limit or [])}")
    return [end - start for start, end in pairwise(cuts)]


def check_partitions(layers: int, partitions: int) -> None:
    """Check that there is a layer for each partition.

    Raises:
        ValueError: there are fewer layers than partitions, or partitions is below 1.
    """
    if operator.index(partitions) < 1:
        raise ValueError(f"partitions must be 1 or more, not {partitions}")
    if layers < partitions:
        raise ValueError(f"{layers} layers cannot be split into {partitions} partitions: one would be empty")


def _misfit(sizes: list[float], limits: list[float]) -> str:
    """Say what exceeds the limits: a layer, all layers together, or some partition of every split."""
    total, room = math.fsum(sizes), sum(limits)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] > max(limits):
        return f"layer {largest} has size {sizes[largest]:.15g}, but the largest limit is {max(limits):.15g}"
    together = f"all layers together have size {total:.15g}"
    if total > room:
        return f"{together}, but all limits together are {room:.15g}"
    return f"{together}, and all limits together are {room:.15g}, but every split exceeds one of the limits"


def _floats(name: str, values: Iterable[float], *, zero: bool = True, infinity: bool = False) -> list[float]:
    """Return the numbers as floats.

    Raises:
        ValueError: one is negative, not a number, infinite unless `infinity`, or zero unless `zero`.
    """
    values = list(values)
    floats = [float(value) for value in values]
    faults = [
        f"{name}[{index}] is {values[index]}"
        for index, value in enumerate(floats)
        if not (value > 0 or (value == 0 and zero)) or (value == math.inf and not infinity)
    ]
    if faults:
        must = ("" if infinity else "finite and ") + ("not negative" if zero else "above zero")
        raise ValueError(f"{name} must be {must}: {', '.join(faults)}")
    return floats
