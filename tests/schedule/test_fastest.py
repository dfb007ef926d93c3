"""Generated programs idle no more than published ones in the same memory, keep any limit, and can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.schedule import Action, ScheduleName, fastest, places_of, program, simulate, verify
from torchgpipe.schedule.action import with_recomputation
from torchgpipe.schedule.bound import least_time
from torchgpipe.schedule.programs import usual_places
from torchgpipe.schedule.simulation import Terms
from torchgpipe.schedule.work import work_of

#: By devices and micro-batches, the published idle shares at equal times (arXiv 2401.10241 and 2405.15362).
PUBLISHED: dict[tuple[int, int], dict[ScheduleName, float]] = {
    (4, 8): {"Interleaved1F1B": 0.158, "ZeroBubble": 0.1112, "V-Min": 0.1865, "V-Half": 0.0944, "ZB-V": 0.0589},
    (4, 16): {"Interleaved1F1B": 0.0858, "ZeroBubble": 0.059, "V-Min": 0.103, "V-Half": 0.05, "ZB-V": 0.0304},
    (8, 16): {"Interleaved1F1B": 0.1796, "ZeroBubble": 0.1274, "V-Min": 0.2196, "V-Half": 0.1505, "ZB-V": 0.0681},
    (8, 32): {"Interleaved1F1B": 0.0987, "ZeroBubble": 0.0681, "V-Min": 0.1234, "V-Half": 0.0814, "ZB-V": 0.0353},
    (12, 48): {"Interleaved1F1B": 0.1029},
    (16, 64): {"Interleaved1F1B": 0.105, "ZeroBubble": 0.0726, "V-Min": 0.1333, "V-Half": 0.0966, "ZB-V": 0.0377},
    (32, 128): {"Interleaved1F1B": 0.1081, "ZeroBubble": 0.0748, "V-Half": 0.104, "ZB-V": 0.0389},
}

#: By name, the cells that a device keeps at most.
MEMORY: dict[ScheduleName, Callable[[int], int]] = {
    "Interleaved1F1B": lambda n: 2 * n,
    "ZeroBubble": lambda n: n,
    "V-Min": lambda n: 2 * ((n + 4) // 3),
    "V-Half": lambda n: 2 * ((n + 2) // 2),
    "ZB-V": lambda n: 2 * n,
}

#: The times of F, I, W and of a transfer in models of 1.5, 6.2 and 14.6 billion parameters (arXiv 2401.10241).
MODELS = {
    (8, 24): (18.522, 18.086, 9.337, 0.601),
    (8, 32): (29.718, 29.444, 19.927, 0.527),
    (16, 48): (11.347, 11.248, 8.132, 0.377),
}


@pytest.mark.parametrize(("n", "m"), PUBLISHED)
def test_named_programs_idle_no_more_than_published_in_no_more_memory(n: int, m: int) -> None:
    for name, share in PUBLISHED[n, m].items():
        made = simulate(program(name, m, usual_places(name, n)))
        assert made.bubble <= share, name
        assert max(made.peaks) <= MEMORY[name](n), name


@pytest.mark.parametrize(
    ("sizes", "half", "full"), [((8, 24), 0.1702, 0.0722), ((8, 32), 0.1145, 0.0471), ((16, 48), 0.1682, 0.0714)]
)
def test_times_of_models_idle_no_more_than_published(sizes: tuple[int, int], half: float, full: float) -> None:
    (n, m), (forward, inputs, weights, transfer) = sizes, MODELS[sizes]
    costs: Any = {"F": forward / 2, "I": inputs / 2, "W": weights / 2}
    places = usual_places("ZB-V", n)
    for limit, share in ((2 * ((n + 2) // 2), half), (2 * n, full)):
        made = simulate(fastest(m, places, costs, limits=limit, transfer=transfer), costs, transfer=transfer)
        assert 1 - m * (forward + inputs + weights) / made.seconds <= share + 5e-5
        assert max(made.peaks) <= limit


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[int], dict[str, Any], list[float]]:
    """Draw micro-batches and placements, with times, memory and limits of which each may differ by action."""
    m = draw(st.integers(1, 9))
    places = places_of(draw(st.lists(st.integers(0, 3), min_size=1, max_size=7)))
    seed = draw(st.integers(0, 99))

    def number(salt: int, low: int, high: int) -> Callable[[Action], float]:
        by_micro_batch = draw(st.booleans())
        kinds = {"F": 1, "B": 2, "I": 3, "W": 4, "R": 5}

        def of(action: Action) -> float:
            mixed = (7919 * (action.j + 1) + 31 * salt + seed + 131 * (action.i + 1) * by_micro_batch) * 2654435761
            mixed += kinds[action.kind] * 40503 if salt == 0 else 0
            return low + (mixed >> 7) % 1000 / 1000 * (high - low)

        return of

    model: dict[str, Any] = {"costs": number(0, draw(st.sampled_from([0, 1])), 3), "memory": number(1, 0, 2)}
    model |= {"waiting": number(2, 0, 1) if draw(st.booleans()) else None}
    model |= {"recomputed": number(3, 1, 4) if draw(st.booleans()) else None}
    model |= {"transfer": number(4, 0, 2) if draw(st.booleans()) else 0.0}
    return m, places, model, draw(st.lists(st.sampled_from([1.0, 1.3, 2.0, 5.0]), min_size=4, max_size=4))


@settings(deadline=None)
@given(problem=problems(), split=st.booleans())
def test_programs_keep_limits_and_run(problem: tuple[int, list[int], dict[str, Any], list[float]], split: bool) -> None:
    m, places, model, factors = problem
    d = 1 + max(places)
    with pytest.raises(ValueError, match=r"limits must be \[.*\] or more") as refused:
        fastest(
            m, places, **{**model, "memory": lambda action: 1e-3 + model["memory"](action)}, limits=0.0, split=split
        )
    assert refused
    least = _least(refused.value)
    limits = [factor * need for factor, need in zip(factors, least)]
    made = fastest(m, places, **model, limits=limits, split=split)
    verify(made, m, places)
    assert made == fastest(m, places, **model, limits=limits, split=split)
    for row in made:
        for j in range(len(places)):
            for kind in "FBIW":
                numbers = [action.i for action in row if (action.kind, action.j) == (kind, j)]
                assert numbers == sorted(numbers), "micro-batches stay in their order"
    if model["recomputed"]:
        made = with_recomputation(made, [m] * len(places))
    simulated = simulate(made, **model)
    assert len(simulated.peaks) == d
    assert all(peak <= limit * (1 + 1e-6) for peak, limit in zip(simulated.peaks, limits))
    work, _, unit = work_of(m, places, Terms(**model), limits, split)
    if not model["recomputed"]:  # A cell whose backward follows at once is not recomputed.
        assert simulated.seconds >= least_time(work) * unit * (1 - 1e-9)


def _least(error: ValueError) -> Sequence[float]:
    return [float(number) for number in str(error).partition("[")[2].partition("]")[0].split(",")]


@settings(deadline=None, max_examples=25)
@given(
    case=st.sampled_from([(2, [0, 1], "FIW"), (3, [0, 1], "FB"), (2, [0, 1, 2], "FB"), (2, [0, 1, 0], "FB")]),
    times=st.lists(st.sampled_from([0.5, 1.0, 1.3, 3.0]), min_size=3, max_size=3),
    limit=st.sampled_from([2.0, 3.0, 9.0]),
    transfer=st.sampled_from([0.0, 0.4]),
)
def test_the_best_of_all_orders_is_between_the_bound_and_the_program(
    case: tuple[int, list[int], str], times: list[float], limit: float, transfer: float
) -> None:
    m, places, kinds = case
    costs: Any = {"F": times[0], "B": times[1], "I": times[1], "W": times[2]}
    rows = []
    for device in range(1 + max(places)):
        own = [j for j, place in enumerate(places) if place == device]
        chain = [("F", j) for j in own] + [(kind, j) for j in reversed(own) for kind in kinds[1:]]
        orders = _orders(m, len(chain))
        rows.append([[Action(*_nth(chain, order, k)) for k in range(len(order))] for order in orders])
    best = float("inf")
    for lists in product(*rows):
        with suppress(ValueError):
            simulated = simulate(lists, costs, transfer=transfer)
            if max(simulated.peaks) <= limit:
                best = min(best, simulated.seconds)
    split = kinds == "FIW"
    made = fastest(m, places, costs, limits=limit, transfer=transfer, split=split)
    work, _, unit = work_of(m, places, Terms(costs, None, None, None, transfer), limit, split)
    assert least_time(work) * unit <= best + 1e-6
    assert best <= simulate(made, costs, transfer=transfer).seconds + 1e-6 <= 1.1 * best


@cache
def _orders(m: int, length: int) -> list[tuple[int, ...]]:
    """Return all orders of ``m`` micro-batches, of each of which there are so many."""
    return sorted(set(permutations([i for i in range(m) for _ in range(length)])))


def _nth(chain: list[Any], order: Sequence[int], k: int) -> tuple[Any, int, int]:
    """Return the action at a place of an order of micro-batches, each of which runs its chain."""
    kind, j = chain[order[:k].count(order[k])]
    return kind, order[k], j


def test_limits_that_cannot_be_kept_are_refused_with_the_least() -> None:
    with pytest.raises(ValueError, match=r"limits must be \[5.0, 5.0\] or more, .* but got 4"):
        fastest(4, [0, 1, 1, 0], memory=[2, 4, 1, 3], limits=4)
    with pytest.raises(ValueError, match=r"limits must be \[2.0, 2.0\] or more, .* but got \[9\]"):
        fastest(4, [0, 1, 1, 0], limits=[9])
    assert max(simulate(fastest(4, [0, 1, 1, 0], memory=[2, 4, 1, 3], limits=5), memory=[2, 4, 1, 3]).peaks) == 5


def test_recomputation_trades_time_for_memory() -> None:
    """With a quarter kept until R, twice as many micro-batches fit, and R runs before the gradient is there."""
    n, m = 4, 16
    costs: Any = {"F": 1.0, "I": 1.0, "W": 1.0, "R": 1.0}
    made = fastest(m, range(n), costs, [0.25] * n, recomputed=[0.75] * n, limits=2.0)
    again = with_recomputation(made, [m] * n)
    simulated = simulate(again, costs, [0.25] * n, recomputed=[0.75] * n)
    assert max(simulated.peaks) <= 2.0
    kept = simulate(fastest(m, range(n), costs, limits=2.0), costs)
    assert simulated.seconds < kept.seconds


@pytest.mark.parametrize("places", [[0, 1], [0, 1, 1, 0], [0, 1, 0, 1]])
def test_actions_that_take_no_time_run(places: list[int]) -> None:
    """A plan's first partition takes none in I, and its program was empty: 'the program is for 0 micro-batches'."""

    def costs(action: Action) -> float:
        return 0.0 if action.kind == "I" and not action.j else {"F": 8.1, "I": 3.7, "W": 18.9}[action.kind] + action.j

    verify(fastest(2, places, costs), 2, places)
