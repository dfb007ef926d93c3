"""Find the choice of the fewest simulated seconds among those that fit, and prove how good it is.

    1. Bound all partitions by the paths that matter for any cuts (`bounds.py`); take the balance of the least bound.
    2. Improve it by moving cuts, as long as that helps. Each longest path of a balance sharpens the bounds.
    3. Forbid partitions that no quicker balance has. By halving, find the largest time below which nothing is left.
    4. If the bound is still below the seconds: grow balances from the left, that of the least bound first.

The answer is exact if step 4 comes to its end. Otherwise the least bound that is still open says how much better
another choice could be at most. All numbers are right to `ROUNDING`, and bytes are whole numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import islice, pairwise, product
from typing import NamedTuple, TypeAlias

import numpy as np

from torchgpipe_balancing.planning.bounds import Bounds, even_cuts, first_paths
from torchgpipe_balancing.planning.fitting import Cuts, Fitting, moved
from torchgpipe_balancing.planning.makespan import KINDS, PRICES, TRANSFER, Array, Makespan
from torchgpipe_balancing.planning.problem import Choice, Outcome, Problem
from torchgpipe_balancing.planning.recompute import Answer, answers, least_excess, shared
from torchgpipe_balancing.planning.tables import Tables

__all__ = ["ROUNDING", "Misfit", "Solution", "lower_bound", "solve"]

#: Sums are rounded; so a choice that is quicker by less than this share is not quicker.
ROUNDING = 1e-12

#: So many sets of recomputed layers are tried for a balance; more than a few are rare.
TRIED = 256

Costed: TypeAlias = tuple[list[tuple[float, frozenset[int]]], bool]


class Solution(NamedTuple):
    """A choice that fits.

    Attributes:
        choice: the choice
        outcome: what it costs
        bound: no choice that fits takes fewer seconds than this
    """

    choice: Choice
    outcome: Outcome
    bound: float

    @property
    def gap(self) -> float:
        """By which share the seconds exceed the bound; 0 if no choice is better."""
        return self.outcome.seconds / self.bound - 1 if self.bound else math.inf if self.outcome.seconds else 0.0


class Misfit(NamedTuple):
    """The choice that is nearest to fitting: that with the least largest excess over the memory of a device.

    Attributes:
        choice: the choice
        outcome: what it costs
        excess: for each device, the bytes that it has too few
        proven: whether it is proven that nothing fits; otherwise the search has found nothing that does
    """

    choice: Choice
    outcome: Outcome
    excess: list[float]
    proven: bool


def solve(problem: Problem, *, limit: int = 1000) -> Solution | Misfit:
    """Return the best choice that fits the devices, or the one that is nearest to fitting.

    Of equally quick choices that the search meets, it takes one with fewer recomputed layers, then with the smaller
    largest memory.

    Args:
        problem: the layers, the devices, and the program

    Keyword Args:
        limit: the number of steps of the search after which it stops, without a proof that its answer is the best

    Raises:
        ValueError: there are fewer layers than partitions.
    """
    return _Search(problem).run(limit)


def lower_bound(problem: Problem) -> float:
    """Return a bound in a short time: no choice that fits takes fewer seconds. Infinite if it is clear that none fits.

    Raises:
        ValueError: there are fewer layers than partitions.
    """
    return _Search(problem).bounds.least * (1 - ROUNDING)


class _Search:
    """The search for the best choice of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._n, self._size = len(problem.places), len(problem.layers)
        if self._size < self._n:
            raise ValueError(
                f"{self._size} layers cannot be split into {self._n} partitions: one would be empty; "
                "take fewer partitions"
            )
        self._tables = Tables(problem)
        self._prices = self._tables.prices
        self._graph = Makespan(problem.program, self._n)
        self._fitting = Fitting(self._tables)
        kinds = {action.kind for own in problem.program for action in own}
        self._kinds = [index for index, kind in enumerate(KINDS) if kind in kinds]
        even = self._prices_of([tuple(self._size * j // self._n for j in range(self._n + 1))])[0]
        even[:] = even.mean(axis=0)  # One costly layer would be on all paths.
        slowness = [device.slowness for device in problem.devices]
        paths = first_paths(self._graph, even, problem.places, slowness)
        self.bounds = Bounds(self._prices, self._tables.fits, paths)
        #: The best choice so far: its seconds, layers that are recomputed, largest memory, and cuts.
        self._best: tuple[float, int, float, Cuts] = (math.inf, 0, math.inf, ())
        self._recomputed: frozenset[int] = frozenset()
        self._answers: dict[tuple[int, int, int], tuple[list[Answer], bool]] = {}
        self._known: dict[Cuts, Costed] = {}
        self._tried: set[Cuts] = set()
        #: The least bound of all balances whose sets of layers were not all tried.
        self._open = math.inf

    def run(self, limit: int) -> Solution | Misfit:
        proven = self._start()
        least = bound = math.inf
        if proven is None:
            least = self._probe()
            bound, proven = self._grow(limit)
        if not self._best[-1]:
            return self._misfit(proven)
        choice = self._choice(self._best[-1], self._recomputed)
        outcome = self._problem.outcome(choice)
        bound = max(least if least < self._target else 0.0, min(bound, self._open))
        return Solution(choice, outcome, outcome.seconds if bound >= self._target else min(bound, outcome.seconds))

    @property
    def _target(self) -> float:
        """Only what takes less is better."""
        return self._best[0] * (1 - ROUNDING / 2)

    # ---- Step 1 and 2: a good balance.

    def _start(self) -> bool | None:
        """Find a balance that fits. Return True if it is proven that there is none, or that it is the best."""
        if self.bounds.least == math.inf:
            return True
        starts = [self._prices[:, :TRANSFER][:, self._kinds].sum(1)]
        if not self._fitting.is_lone:
            starts.append(self._tables.bytes)
        for weights in starts:
            cuts = self._fitting.nearest(tuple(even_cuts(np.where(self._tables.fits, weights, math.inf))))
            self._descend(cuts)
            self._sharpen([cuts])
        for _ in range(6 if self._fitting.is_lone else 1):
            cuts = self._fitting.nearest(tuple(self.bounds.balance()))
            known = cuts in self._tried
            self._descend(cuts)
            if not self._best[-1]:
                return None
            self._sharpen([cuts, self._best[-1]])
            if self.bounds.least >= self._target:
                return True
            if known:
                break
        return None

    def _descend(self, cuts: Cuts) -> None:
        """Move cuts as long as that makes the step quicker."""
        self._try([cuts])
        at, least = cuts, self._value(cuts)
        for _ in range(60):
            others = [one for one in moved(at) if self._fitting.may(one)]
            if not others:
                return
            values = self._graph.seconds(self._prices_of(others))
            order = np.argsort(values, kind="stable")
            better = [others[k] for k in order[:6] if values[k] < least * (1 - ROUNDING)]
            for one in better:
                self._try([one])
                value = self._value(one)
                if value < least * (1 - ROUNDING):
                    at, least = one, value
                    break
            else:
                return

    def _value(self, cuts: Cuts) -> float:
        """Return the seconds of the best sets of layers of a balance; infinite if it does not fit."""
        return min([seconds for seconds, _ in self._costed(cuts)[0]], default=math.inf)

    def _sharpen(self, found: Sequence[Cuts]) -> None:
        """Take the longest paths of these balances into account."""
        paths = np.unique(self._graph.critical(self._prices_of(list(dict.fromkeys(found)))), axis=0)
        fresh = [path for path in paths if not (self.bounds.paths == path).all(axis=(1, 2)).any()]
        if fresh:
            self.bounds.add(np.array(fresh))

    # ---- Step 3: forbid partitions.

    def _probe(self) -> float:
        """Return a lower bound, found by halving; and forbid what cannot be better than the best choice."""
        if not self._best[-1]:
            return self.bounds.least
        self.bounds.tighten(self._target, rounds=4)
        low, high = min(self.bounds.least, self._target), self._target
        for _ in range(8):
            if high - low <= 1e-4 * high:
                break
            middle = (low + high) / 2
            trial = self.bounds.copy()
            trial.tighten(middle, rounds=6)
            if trial.least >= middle:
                low = middle
            else:
                high = middle
                cuts = tuple(trial.balance())
                if cuts not in self._tried and (self._fitting.is_lone or self._fitting.fits(cuts)):
                    self._try([cuts])
        return low

    # ---- Step 4: grow balances from the left.

    def _grow(self, limit: int) -> tuple[float, bool]:
        """Return the least bound that is still open, and whether the search came to its end."""
        bounds, n = self.bounds, self._n
        paths = bounds.paths
        count = 0
        # Of equal bounds the longest balance comes first.
        heap: list[tuple[float, int, int, Cuts, Array]] = [(bounds.least, 0, 0, (0,), np.zeros(len(paths)))]
        batch: list[Cuts] = []
        for _ in range(limit):
            while heap and heap[0][1] == -n and heap[0][0] < self._target:
                batch.append(heapq.heappop(heap)[3])
                if len(batch) >= 32:
                    break
            if len(batch) >= 32 or not heap or heap[0][0] >= self._target:
                self._try(batch)
                batch = []
            if not heap or heap[0][0] >= self._target:
                return math.inf, True
            if heap[0][1] == -n:
                continue
            least, _, _, cuts, sums = heapq.heappop(heap)
            j, start = len(cuts) - 1, cuts[-1]
            row = np.maximum(bounds.through[j, start], bounds.minimax[j + 1])
            ends = np.flatnonzero(row < self._target)
            grown = sums[:, None] + paths[:, j] @ self._prices[j, :, start, ends].T
            rows = np.maximum(row[ends], (grown + bounds.after[:, j + 1, ends]).max(0))
            for k in np.flatnonzero(rows < self._target):
                count += 1
                heapq.heappush(heap, (max(least, float(rows[k])), -j - 1, count, (*cuts, int(ends[k])), grown[:, k]))
        self._try(batch)
        return heap[0][0] if heap else math.inf, not heap

    # ---- What a balance costs.

    def _try(self, found: Sequence[Cuts]) -> None:
        """Find the best sets of recomputed layers of these balances, if they could be better than the best choice."""
        found = [cuts for cuts in found if cuts not in self._tried]
        if not found:
            return
        self._tried.update(found)
        for cuts, value in zip(found, self._graph.seconds(self._prices_of(found))):
            if value > self._best[0] * (1 + ROUNDING):
                continue
            costed, proven = self._costed(cuts)
            for seconds, recomputed in costed:
                if seconds <= self._best[0] * (1 + ROUNDING):
                    memory = max(self._fitting.needs(cuts, recomputed))
                    one = (seconds, len(recomputed), memory, cuts)
                    if seconds < self._best[0] * (1 - ROUNDING) or one[1:] < self._best[1:]:
                        self._best, self._recomputed = one, recomputed
            if not proven:
                self._open = min(self._open, float(value))

    def _costed(self, cuts: Cuts) -> Costed:
        """Return the seconds of the sets of layers that may be best; and whether no other set can be better."""
        if cuts not in self._known:
            self._known[cuts] = self._cost(list(pairwise(cuts)))
        return self._known[cuts]

    def _cost(self, spans: list[tuple[int, int]]) -> Costed:
        if not self._fitting.is_lone:
            return self._costed_shared(spans)
        own = [self._answers_of(j, *span) for j, span in enumerate(spans)]
        proven = all(one[1] for one in own) and math.prod(len(one[0]) for one in own) <= TRIED
        choices = list(islice(product(*(one[0] for one in own)), TRIED))
        prices = np.array([[self._price(j, *spans[j], one) for j, one in enumerate(choice)] for choice in choices])
        sets = [frozenset[int]().union(*(one.layers for one in choice)) for choice in choices]
        return list(zip(self._graph.seconds(prices).tolist(), sets)), proven

    def _costed_shared(self, spans: list[tuple[int, int]]) -> Costed:
        layers, proven = frozenset[int](), True
        for device, holding in enumerate(self._tables.holdings):
            mine = [spans[j] for j in holding.partitions]
            if least_excess(self._tables, device, mine)[0] > 0:
                return [], True
            own, is_best = shared(self._tables, device, mine)
            layers, proven = layers | own, proven and is_best
        chosen = [
            Answer(own, math.fsum(self._tables.extra[k] for k in own))
            for own in (layers & frozenset(range(*span)) for span in spans)
        ]
        prices = np.array([[self._price(j, *spans[j], one) for j, one in enumerate(chosen)]])
        return [(float(self._graph.seconds(prices)[0]), layers)], proven

    def _answers_of(self, j: int, start: int, end: int) -> tuple[list[Answer], bool]:
        key = (j, start, end)
        if key not in self._answers:
            self._answers[key] = own, proven = answers(self._tables, *key)
            if proven:  # From now on the tables know them.
                for kind, values in enumerate(zip(*(self._price(*key, one)[:2] for one in own))):
                    self._prices[j, kind, start, end] = max(self._prices[j, kind, start, end], min(values))
        return self._answers[key]

    def _price(self, j: int, start: int, end: int, answer: Answer) -> Array:
        """Return the prices of a partition that recomputes these layers."""
        prices: Array = self._tables.plain(j, start, end)
        slow = self._problem.devices[self._problem.places[j]].slowness
        prices[0] += slow * self._problem.cell["F"] * len(answer.layers)
        prices[1] += slow * answer.seconds
        return prices

    def _prices_of(self, found: Sequence[Cuts]) -> Array:
        """Return lower bounds of the prices of balances, [balances, n, PRICES]."""
        cuts = np.array(found)
        rows, kinds = np.arange(self._n)[None, :, None], np.arange(PRICES)[None, None, :]
        return np.asarray(self._prices[rows, kinds, cuts[:, :-1, None], cuts[:, 1:, None]])

    def _misfit(self, proven: bool) -> Misfit:
        """Return the choice that is nearest to fitting."""
        cuts, recomputed = self._fitting.least_misfit(sorted(self._tried))
        choice = self._choice(cuts, recomputed)
        outcome = self._problem.outcome(choice)
        over = [max(0.0, need - device.memory) for need, device in zip(outcome.memory, self._problem.devices)]
        return Misfit(choice, outcome, over, proven)

    @staticmethod
    def _choice(cuts: Cuts, recomputed: frozenset[int]) -> Choice:
        return Choice(tuple(end - start for start, end in pairwise(cuts)), recomputed)
