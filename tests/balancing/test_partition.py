"""A split is the best one: all splits are compared if they are few, and otherwise a textbook recurrence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from benchmarks.balance import optimum
from torchgpipe_balancing import partition

Value = tuple[Fraction, Fraction]  # the largest load, and the sum of squared loads

whole = st.integers(0, 5)
# Sums that floating point cannot distinguish, and magnitudes that absorb each other.
tricky = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0, 1 + 2.0**-52, 1e17, 1e300, 1e-300, 5e-324])
large = st.integers(0, 10**40)
anything = st.floats(0, allow_infinity=False, allow_nan=False)


def numbers(count: int) -> st.SearchStrategy[list[float]]:
    kinds: list[st.SearchStrategy[float]] = [whole, tricky, large, anything]
    return st.one_of([st.lists(kind, min_size=count, max_size=count) for kind in kinds])


def value(costs: Sequence[float], speeds: Sequence[float], cuts: Sequence[int]) -> Value:
    """Return the largest load and the sum of squared loads of a split."""
    loads = [sum(map(Fraction, costs[a:b])) / Fraction(s) for (a, b), s in zip(pairwise(cuts), speeds, strict=True)]
    return max(loads), sum(load * load for load in loads)


def alike(found: Value, wanted: Value) -> bool:
    """Return whether the largest loads and the sums of squares differ by no more than floats are rounded."""
    return all(one <= other * (1 + Fraction(1, 10**9)) for one, other in zip(found, wanted))


def cuts_of(balance: list[int]) -> list[int]:
    assert all(count > 0 for count in balance)
    return [*accumulate(balance, initial=0)]


class Row(NamedTuple):
    """Layers, and the devices for them; without sizes there are no limits."""

    costs: list[float]
    speeds: list[float]
    sizes: Sequence[float] | None = None
    limits: list[float] | None = None

    def fits(self, cuts: Sequence[int]) -> bool:
        if self.sizes is None or self.limits is None:
            return True
        spans = zip(pairwise(cuts), self.limits, strict=True)
        return all(sum(map(Fraction, self.sizes[a:b])) <= limit for (a, b), limit in spans)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    def devices(figure: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(figure, min_size=n, max_size=n))

    layers = draw(st.integers(1, 9))
    n = draw(st.integers(1, layers))
    costs = draw(numbers(layers))
    speed = st.one_of(st.sampled_from([1, 2, 0.5, 0.1, 1e6, 1e-6]), st.floats(0.1, 10), st.integers(1, 3))
    speeds = draw(st.sampled_from([[1.0] * n, devices(speed)]))
    if draw(st.booleans()):
        return Row(costs, speeds)
    sizes = draw(st.lists(st.integers(0, 2**40), min_size=layers, max_size=layers))  # bytes
    shares = devices(st.floats(0, 1.1) | st.just(math.inf))
    limits = [share * sum(sizes) if any(sizes) else 0 for share in shares]
    assume(not any(map(math.isnan, limits)))
    return Row(costs, speeds, sizes, limits)


@given(rows())
@example(Row([0.1, 0.2, 0.3, 0.3, 0.3], [1, 1]))
@example(Row([0, 0, 0, 0], [1, 1]))
# Filled to the limit, device 0 would leave only the heavy layer to the slow device 1.
@example(Row([1, 1, 100], [1, 0.1, 10]))
# [3, 1, 3] has the same largest load and would also fit; its sum of squares is 46, not 44.
@example(Row([2, 2, 2, 1, 3, 0, 0], [1] * 3, [0, 0, 2, 1, 1, 1, 0], [3, 1, 6]))
# Rounding takes another split of these, which is no worse than floats can tell.
@example(Row([1.0, 1.0, 0.3, 0.1, 0.1, 0.2], [1] * 4))
@example(Row([1e8, 1.0, 0.2, 0.2, 1.0], [1] * 3))
@example(Row([1000000001.0, 0.4, 1.0, 1000000001.0, 0.2, 1e17], [1] * 3))
def test_the_best_of_all_splits_that_keep_the_limits(row: Row) -> None:
    """On devices that are alike or not."""
    cuts = [[0, *cuts, len(row.costs)] for cuts in combinations(range(1, len(row.costs)), len(row.speeds) - 1)]
    wanted = min([value(row.costs, row.speeds, split) for split in cuts if row.fits(split)], default=None)
    if wanted is None:
        with pytest.raises(ValueError, match="sizes do not fit into limits"):
            partition(row.costs, speeds=row.speeds, sizes=row.sizes, limits=row.limits)
    else:
        found = cuts_of(partition(row.costs, speeds=row.speeds, sizes=row.sizes, limits=row.limits))
        assert row.fits(found)
        assert alike(value(row.costs, row.speeds, found), wanted)


def recurrence(costs: list[int], partitions: int, bound: int) -> int:
    """Return the least sum of squares within the bound, by the textbook recurrence."""
    sums = [*accumulate(costs, initial=0)]
    least: list[float] = [0, *[math.inf] * len(costs)]
    for _ in range(partitions):
        least = [
            min((least[a] + (sums[b] - sums[a]) ** 2 for a in range(b) if sums[b] - sums[a] <= bound), default=math.inf)
            for b in range(len(costs) + 1)
        ]
    assert isinstance(least[-1], int)
    return least[-1]


MADE: dict[str, Callable[[random.Random], int]] = {
    "small": lambda r: r.randint(0, 9),
    "beyond 26 bits": lambda r: r.randint(0, 10**9),
    "few values, many ties": lambda r: r.choice([0, 0, 10**10 + 1, 3 * 10**10]),
    "one in ten is large": lambda r: r.choice([*range(9), 3000]) * 10**8 + r.randint(0, 9),
    "beyond 64 bits": lambda r: round(r.lognormvariate(0, 2) * 2**80),
}


@pytest.mark.parametrize("kind", MADE)
def test_many_layers(kind: str) -> None:
    rng = random.Random(kind)

    for layers, partitions in [(50, 6), (64, 3), (40, 20), (250, 32)]:
        costs = [MADE[kind](rng) for _ in range(layers)]
        # A much costlier layer loosens the bound, so that many more splits are within it.
        costs[rng.randrange(layers)] += max(costs) * rng.choice([0, 3, 10**6])
        loads = [sum(costs[a:b]) for a, b in pairwise(cuts_of(partition(costs, partitions)))]

        best = optimum(costs, partitions)
        found = Fraction(max(loads)), Fraction(sum(load * load for load in loads))
        assert alike(found, (Fraction(best), Fraction(recurrence(costs, partitions, best))))


@pytest.mark.parametrize(
    ("costs", "more", "balance"),
    [
        ([1, 1, 1, 9, 1, 1], {"partitions": 3}, [3, 1, 2]),
        ([1] * 12, {"speeds": [0.5, 1, 1.5], "partitions": 3}, [2, 4, 6]),
        ([1, 1, 1, 1], {"sizes": [4, 1, 1, 1], "limits": [math.inf, 1]}, [3, 1]),
        (np.array([1, 2, 3, 4]), {"partitions": 2}, [3, 1]),
        (np.array([1, 2, 3, 4], dtype=np.float32), {"partitions": 2}, [3, 1]),
        ([Fraction(x, 3) for x in (1, 2, 3, 4)], {"partitions": 2}, [3, 1]),
    ],
    ids=str,
)
def test_whole_numbers_of_layers_for_numbers_of_any_type(
    costs: list[int], more: dict[str, Any], balance: list[int]
) -> None:
    found = partition(costs, **more)
    assert found == balance
    assert all(type(count) is int for count in found)


@pytest.mark.parametrize(
    ("costs", "arguments", "message"),
    [
        ([1, 2], {"partitions": 3}, "2 layers cannot be split into 3 partitions: one would be empty"),
        ([], {"partitions": 1}, "0 layers cannot be split into 1 partitions: one would be empty"),
        ([1, 2], {"partitions": 0}, "partitions must be 1 or more, not 0"),
        (
            [1, -2, math.nan, math.inf],
            {"partitions": 1},
            "not negative: costs[1] is -2, costs[2] is nan, costs[3] is inf",
        ),
        ([1, 2], {"speeds": [1, 0]}, "speeds must be finite and above zero: speeds[1] is 0"),
        ([1, 2], {"speeds": [math.inf]}, "speeds must be finite and above zero: speeds[0] is inf"),
        ([1, 2], {"partitions": 2, "speeds": [1]}, "speeds has 1 numbers, for 2 partitions"),
        ([1, 2], {"sizes": [1], "limits": [9]}, "sizes has 1 numbers, for 2 layers"),
        ([1, 2], {"partitions": 1, "sizes": [1, 1], "limits": [9, 9]}, "limits has 2 numbers, for 1 partitions"),
        ([1, 2], {"sizes": [1, -1], "limits": [9]}, "sizes must be finite and not negative: sizes[1] is -1"),
        ([1, 2], {"sizes": [1, 1], "limits": [-9]}, "limits must be not negative: limits[0] is -9"),
        ([1, 2], {"limits": [9]}, "sizes and limits go together: give both, or neither"),
        ([1, 2], {}, "partitions is missing: give it, or speeds or limits, one for each partition"),
        ([1, 1], {"sizes": [2, 30.5], "limits": [18, 18]}, "layer 1 has size 30.5, but the largest limit is 18"),
        ([1] * 3, {"sizes": [7] * 3, "limits": [8, 9]}, "layers together have size 21, but all limits together are 17"),
        ([1] * 3, {"sizes": [6] * 3, "limits": [9, 9.5]}, "together are 18.5, but every split exceeds one of the"),
    ],
)
def test_mistakes(costs: list[float], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        partition(costs, **arguments)
    assert message in str(raised.value)
