"""Split layers into consecutive partitions, optimally, by the cost of each layer.

A pipeline is as fast as its slowest partition, so the largest load counts first. Among the splits with the smallest
largest load, the loads are to be as even as possible. `split.py` finds such a split.

The answer is exact. Every float is a fraction, so all numbers become whole numbers of a common unit before any are
compared, and no decision depends on rounding.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from torchgpipe_balancing.split import best_split

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
    with the same largest load, one with the least sum of squared loads is returned. No partition is empty. The
    result is exact for whole numbers and floats of any magnitude. ::

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
    cost = _fractions("costs", costs)
    speed = None if speeds is None else _fractions("speeds", speeds, zero=False)
    size = None if sizes is None else _fractions("sizes", sizes)
    limit = None if limits is None else _fractions("limits", limits, infinity=sum(size or [], Fraction(0)))

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

    slowness = _whole([1 / factor for factor in speed or [Fraction(1)] * n])
    cuts = best_split(_whole(cost), slowness, None if size is None or limit is None else _farthest(size, limit))
    if cuts is None:
        raise ValueError(f"sizes do not fit into limits: {_misfit(size or [], limit or [])}")
    return [end - start for start, end in pairwise(cuts)]


def _farthest(sizes: Sequence[Fraction], limits: Sequence[Fraction]) -> Callable[[int, int], int]:
    """Return a function that returns the farthest cut up to which layers fit, given a partition and its first cut."""
    numbers = _whole([*sizes, *limits])  # in one unit
    sums = list(accumulate(numbers[: len(sizes)], initial=0))
    return lambda j, start: bisect_right(sums, sums[start] + numbers[len(sizes) + j]) - 1


def check_partitions(layers: int, partitions: int) -> None:
    """Check that there is a layer for each partition.

    Raises:
        ValueError: there are fewer layers than partitions, or partitions is below 1.
    """
    if operator.index(partitions) < 1:
        raise ValueError(f"partitions must be 1 or more, not {partitions}")
    if layers < partitions:
        raise ValueError(f"{layers} layers cannot be split into {partitions} partitions: one would be empty")


def _misfit(sizes: list[Fraction], limits: list[Fraction]) -> str:
    """Say what exceeds the limits: a layer, all layers together, or some partition of every split."""
    total, room = sum(sizes, Fraction(0)), sum(limits, Fraction(0))
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] > max(limits):
        return f"layer {largest} has size {_plain(sizes[largest])}, but the largest limit is {_plain(max(limits))}"
    together = f"all layers together have size {_plain(total)}"
    if total > room:
        return f"{together}, but all limits together are {_plain(room)}"
    return f"{together}, and all limits together are {_plain(room)}, but every split exceeds one of the limits"


def _fractions(
    name: str, values: Iterable[float], *, zero: bool = True, infinity: Fraction | None = None
) -> list[Fraction]:
    """Return the numbers as exact fractions. If `infinity` is given, it stands for infinite numbers."""
    fractions = []
    faults = []
    for index, value in enumerate(values):
        fraction = infinity if value == math.inf else _fraction(value)
        if fraction is None or fraction < 0 or (fraction == 0 and not zero):
            faults.append(f"{name}[{index}] is {value}")
        else:
            fractions.append(fraction)
    if faults:
        must = ("finite and " if infinity is None else "") + ("not negative" if zero else "above zero")
        raise ValueError(f"{name} must be {must}: {', '.join(faults)}")
    return fractions


def _fraction(value: float) -> Fraction | None:
    """Return a number as an exact fraction, or None if it is not finite."""
    try:
        # Fraction does not accept NumPy's floats, and NumPy's integers have no as_integer_ratio.
        return Fraction(*value.as_integer_ratio()) if hasattr(value, "as_integer_ratio") else Fraction(value)
    except (OverflowError, ValueError):
        return None


def _whole(numbers: Sequence[Fraction]) -> list[int]:
    """Return the numbers as multiples of a unit in which all of them are whole."""
    unit = math.lcm(*(number.denominator for number in numbers))
    return [number.numerator * (unit // number.denominator) for number in numbers]


def _plain(number: Fraction) -> int | float:
    """Return the number as a reader would write it."""
    return number.numerator if number.denominator == 1 else float(number)
