"""A split is the best one: all splits are compared if they are few, and otherwise a textbook recurrence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

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


def splits(layers: int, partitions: int) -> list[list[int]]:
    return [[0, *cuts, layers] for cuts in combinations(range(1, layers), partitions - 1)]


def cuts_of(balance: list[int]) -> list[int]:
    assert all(count > 0 for count in balance)
    return [*accumulate(balance, initial=0)]


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], int]:
    layers = draw(st.integers(1, 9))
    return draw(numbers(layers)), draw(st.integers(1, layers))


@given(rows())
@example(([0.1, 0.2, 0.3, 0.3, 0.3], 2))
@example(([0, 0, 0, 0], 2))
# Rounding would prefer a worse split of these.
@example(([1.0, 1.0, 0.3, 0.1, 0.1, 0.2], 4))
@example(([1e8, 1.0, 0.2, 0.2, 1.0], 3))
@example(([1000000001.0, 0.4, 1.0, 1000000001.0, 0.2, 1e17], 3))
def test_best_of_all_splits(row: tuple[list[float], int]) -> None:
    costs, partitions = row
    found = cuts_of(partition(costs, partitions))

    alike = [1] * partitions
    assert value(costs, alike, found) == min(value(costs, alike, cuts) for cuts in splits(len(costs), partitions))


@given(rows(), st.data())
def test_best_of_all_splits_on_unequal_devices(row: tuple[list[float], int], data: st.DataObject) -> None:
    costs, partitions = row
    speed = st.one_of(st.sampled_from([1, 2, 0.5, 0.1, 1e300, 1e-300]), st.floats(0.1, 10), st.integers(1, 3))
    speeds = data.draw(st.lists(speed, min_size=partitions, max_size=partitions))
    found = cuts_of(partition(costs, speeds=speeds))

    assert value(costs, speeds, found) == min(value(costs, speeds, cuts) for cuts in splits(len(costs), partitions))


@given(rows(), st.data())
def test_best_of_the_splits_within_limits(row: tuple[list[float], int], data: st.DataObject) -> None:
    costs, partitions = row
    sizes = data.draw(numbers(len(costs)))
    part = st.one_of(st.floats(0, 1.1), st.just(math.inf))
    limits = [
        share * sum(sizes) if any(sizes) else 0
        for share in data.draw(st.lists(part, min_size=partitions, max_size=partitions))
    ]
    assume(not any(map(math.isnan, limits)))
    speeds = data.draw(st.lists(st.sampled_from([1, 2, 3.5]), min_size=partitions, max_size=partitions))

    def fits(cuts: Sequence[int]) -> bool:
        return all(
            sum(map(Fraction, sizes[a:b])) <= limit for (a, b), limit in zip(pairwise(cuts), limits, strict=True)
        )

    fitting = [cuts for cuts in splits(len(costs), partitions) if fits(cuts)]
    if fitting:
        found = cuts_of(partition(costs, speeds=speeds, sizes=sizes, limits=limits))
        assert fits(found)
        assert value(costs, speeds, found) == min(value(costs, speeds, cuts) for cuts in fitting)
    else:
        with pytest.raises(ValueError, match="sizes do not fit into limits"):
            partition(costs, speeds=speeds, sizes=sizes, limits=limits)


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


def bottleneck(costs: list[int], partitions: int) -> int:
    """Return the smallest largest load, by bisection with a greedy trial."""

    def reaches(bound: int) -> bool:
        used, load = 1, 0
        for cost in costs:
            load += cost
            if load > bound:
                used, load = used + 1, cost
        return used <= partitions

    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return low


MADE: dict[str, Callable[[random.Random], int]] = {
    "small": lambda r: r.randint(0, 9),
    "beyond 26 bits": lambda r: r.randint(0, 10**9),
    "few values, many ties": lambda r: r.choice([0, 0, 10**10 + 1, 3 * 10**10]),
    "one in ten is large": lambda r: r.choice([*range(9), 3000]) * 10**8 + r.randint(0, 9),
    "beyond 64 bits": lambda r: round(r.lognormvariate(0, 2) * 2**80),
}


@pytest.mark.parametrize("kind", MADE)
def test_many_layers(kind: str) -> None:
    made = random.Random(kind)

    for layers, partitions in [(50, 6), (64, 3), (40, 20)]:
        costs = [MADE[kind](made) for _ in range(layers)]
        # A much costlier layer loosens the bound, so that many more splits are within it.
        costs[made.randrange(layers)] += max(costs) * made.choice([0, 3, 10**6])
        loads = [sum(costs[a:b]) for a, b in pairwise(cuts_of(partition(costs, partitions)))]

        assert max(loads) == bottleneck(costs, partitions)
        assert sum(load * load for load in loads) == recurrence(costs, partitions, max(loads))


@pytest.mark.parametrize("heavy", [0, 10**9], ids=["even", "one large layer"])
def test_2000_layers_on_64_partitions(heavy: int) -> None:
    made = random.Random(0)
    costs = [made.randint(1, 10**7) for _ in range(2000)]
    costs[1234] += heavy
    loads = [sum(costs[a:b]) for a, b in pairwise(cuts_of(partition(costs, 64)))]

    assert len(loads) == 64
    assert max(loads) == bottleneck(costs, 64)
    # The other partitions are as even as their layers allow: each is close to the mean.
    rest = sorted(loads)[:-1] if heavy else loads
    assert max(abs(load - sum(rest) / len(rest)) for load in rest) < 10**7


def test_2000_layers_that_cost_nothing() -> None:
    balance = partition([0] * 2000, 64)
    assert len(balance) == 64 and sum(balance) == 2000 and min(balance) > 0


def test_mirror_image_is_as_good() -> None:
    costs = [random.Random(1).random() for _ in range(300)]
    alike = [1] * 17
    there = cuts_of(partition(costs, 17))
    back = cuts_of(partition(costs[::-1], 17))
    assert value(costs, alike, there) == value(costs[::-1], alike, back)


@pytest.mark.parametrize(
    ("costs", "partitions", "balance"),
    [
        ([7], 1, [1]),
        ([1, 2, 3], 1, [3]),
        ([1, 2, 3], 3, [1, 1, 1]),
        ([1, 1, 1, 1, 1, 1], 3, [2, 2, 2]),
        ([9, 1, 1, 1, 1, 1], 3, [1, 2, 3]),
        ([1, 1, 1, 9, 1, 1], 3, [3, 1, 2]),
        ([0, 0, 5, 0], 4, [1, 1, 1, 1]),
    ],
)
def test_small_ones(costs: list[int], partitions: int, balance: list[int]) -> None:
    loads = [sum(costs[a:b]) for a, b in pairwise(cuts_of(balance))]
    found = [sum(costs[a:b]) for a, b in pairwise(cuts_of(partition(costs, partitions)))]
    assert (max(found), sum(x * x for x in found)) == (max(loads), sum(x * x for x in loads))


def test_faster_devices_get_more() -> None:
    assert partition([1] * 12, speeds=[1, 2, 3]) == [2, 4, 6]
    assert partition([1] * 12, speeds=[3, 2, 1]) == [6, 4, 2]
    assert partition([1] * 12, 3, speeds=[0.5, 1, 1.5]) == [2, 4, 6]


def test_slow_device_that_could_take_no_more_than_a_light_layer() -> None:
    # Filled to the limit, device 0 would leave only the heavy layer to the slow device 1.
    assert partition([1, 1, 100], speeds=[1, 0.1, 10]) == [1, 1, 1]


def test_limits_move_cuts() -> None:
    costs = [1, 1, 1, 1]
    assert partition(costs, 2) == [2, 2]
    assert partition(costs, sizes=[4, 1, 1, 1], limits=[4, 4]) == [1, 3]
    assert partition(costs, sizes=[4, 1, 1, 1], limits=[math.inf, 1]) == [3, 1]


def test_even_split_that_only_the_middle_cannot_take() -> None:
    costs, sizes = [2, 2, 2, 1, 3, 0, 0], [0, 0, 2, 1, 1, 1, 0]
    assert partition(costs, 3) == [2, 2, 3]
    assert partition(costs, sizes=sizes, limits=[3, 3, 6]) == [2, 2, 3]
    # [3, 1, 3] has the same largest load and would also fit; its sum of squares is 46, not 44.
    assert partition(costs, sizes=sizes, limits=[3, 1, 6]) == [1, 1, 5]


@pytest.mark.parametrize(
    "costs",
    [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4], dtype=np.float32), (Fraction(x, 3) for x in (1, 2, 3, 4))],
    ids=["integers", "float32", "generator of fractions"],
)
def test_takes_any_numbers(costs: Sequence[float]) -> None:
    balance = partition(costs, 2)
    assert balance == [3, 1]
    assert all(type(count) is int for count in balance)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1, 2], "partitions": 3}, "2 layers cannot be split into 3 partitions: one would be empty"),
        ({"costs": [], "partitions": 1}, "0 layers cannot be split into 1 partitions: one would be empty"),
        ({"costs": [1, 2], "partitions": 0}, "partitions must be 1 or more, not 0"),
        ({"costs": [1, 2], "partitions": -1}, "partitions must be 1 or more, not -1"),
        (
            {"costs": [1, -2, math.nan, math.inf], "partitions": 1},
            "costs must be finite and not negative: costs[1] is -2, costs[2] is nan, costs[3] is inf",
        ),
        ({"costs": [1, 2], "speeds": [1, 0]}, "speeds must be finite and above zero: speeds[1] is 0"),
        ({"costs": [1, 2], "speeds": [math.inf]}, "speeds must be finite and above zero: speeds[0] is inf"),
        ({"costs": [1, 2], "partitions": 2, "speeds": [1]}, "speeds has 1 numbers, for 2 partitions"),
        ({"costs": [1, 2], "sizes": [1], "limits": [9]}, "sizes has 1 numbers, for 2 layers"),
        (
            {"costs": [1, 2], "partitions": 1, "sizes": [1, 1], "limits": [9, 9]},
            "limits has 2 numbers, for 1 partitions",
        ),
        ({"costs": [1, 2], "sizes": [1, -1], "limits": [9]}, "sizes must be finite and not negative: sizes[1] is -1"),
        ({"costs": [1, 2], "sizes": [1, 1], "limits": [-9]}, "limits must be not negative: limits[0] is -9"),
        ({"costs": [1, 2], "limits": [9]}, "sizes and limits go together: give both, or neither"),
        ({"costs": [1, 2]}, "partitions is missing: give it, or speeds or limits, one for each partition"),
        (
            {"costs": [1, 1, 1], "sizes": [2, 30.5, 2], "limits": [18, 18]},
            "sizes do not fit into limits: layer 1 has size 30.5, but the largest limit is 18",
        ),
        (
            {"costs": [1, 1, 1], "sizes": [7, 7, 7], "limits": [8, 9]},
            "sizes do not fit into limits: all layers together have size 21, but all limits together are 17",
        ),
        (
            {"costs": [1, 1, 1], "sizes": [6, 6, 6], "limits": [9, 9.5]},
            "sizes do not fit into limits: all layers together have size 18, and all limits together are 18.5, but "
            "every split exceeds one of the limits",
        ),
        (
            {"costs": [1, 1, 1], "sizes": [1, 5, 1], "limits": [9, 2, 9]},
            "sizes do not fit into limits: all layers together have size 7, and all limits together are 20, but "
            "every split exceeds one of the limits",
        ),
    ],
)
def test_mistakes(arguments: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        partition(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
