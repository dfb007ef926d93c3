"""Simulate a step under each schedule, with the mean times of the recorded cells.

The time of an action is a mean over all recorded cells of its partition. Recomputation counts as backward of the input,
because a recomputed cell has no second half; a schedule that would recompute fewer cells is faster than predicted.
Where a backward was recorded whole, each half takes half of its time. Copies take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchgpipe.schedule import NAMES, Program, ScheduleName, places_of, program, simulate
from torchgpipe.schedule.programs import RESIDENT, SPLITTING
from torchgpipe.timeline.span import Row, Span, milliseconds, percent

__all__ = ["Costs", "Prediction", "mean_costs", "predict", "schedule_of", "table"]

#: The mean seconds of each kind of action in each partition.
Costs: TypeAlias = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class Prediction:
    """What a step under a schedule is expected to take, in a simulation with the mean times of the recorded cells.

    Attributes:
        schedule: the name of the schedule; None for a program of your own
        ran: whether the recorded steps ran under it
        seconds: the time of a step
        bubble: the share of the devices' time in which they are idle
        live: the most micro-batches that a device holds, from forward to the end of backward. Of a recomputed
            micro-batch a device holds only the input until then. A device with several partitions counts the part of a
            micro-batch that is in each.
    """

    schedule: str | None
    ran: bool
    seconds: float
    bubble: float
    live: float


def predict(
    cells: Sequence[Span], rows: Sequence[Row], micro_batches: Mapping[int, int], ran: Program | None
) -> list[Prediction]:
    """Return the predictions for all schedules that fit these devices, and for the program that ran.

    Args:
        cells: the cells of some steps
        rows: the partitions
        micro_batches: the number of micro-batches of each step
        ran: the program that the steps ran, if they ran one

    Returns:
        the predictions; none if a step had no backward, or the steps differ in the number of micro-batches
    """
    steps = {span.step for span in cells}
    differentiated = {span.step for span in cells if span.kind.startswith("backward")}
    counts = {micro_batches[step] for step in steps}
    if steps != differentiated or len(counts) != 1:
        return []
    (m,) = counts
    places = places_of([row.device for row in rows])
    costs = mean_costs(cells, m * len(steps))
    recorded = None if ran is None else list(map(list, ran))
    programs: dict[str | None, Program] = {}
    for name in NAMES:
        made = _made(name, m, places)
        if made != recorded:
            if name == "Interleaved1F1B" and len(rows) == len(set(places)):
                continue  # A device with one partition has nothing to interleave.
            if name not in RESIDENT:
                continue  # It is for weights that come and go.
        if made is not None and made not in programs.values():
            programs[name] = made
    if recorded is not None and recorded not in programs.values():
        programs = {None: recorded, **programs}
    predictions = []
    for schedule, actions in programs.items():
        simulation = simulate(
            actions,
            lambda action: costs.get((action.kind, action.j), 0.0),
            [1 / places.count(place) for place in places],
        )
        predictions.append(
            Prediction(
                schedule, actions == recorded, simulation.seconds, simulation.bubble, max(simulation.peaks, default=0.0)
            )
        )
    return predictions


def schedule_of(ran: Program, m: int, places: Sequence[int]) -> ScheduleName | None:
    """Return the name of the schedule that a program is of, or None for a program of the user's own."""
    actions = list(map(list, ran))
    return next((name for name in NAMES if _made(name, m, places) == actions), None)


def _made(name: ScheduleName, m: int, places: Sequence[int]) -> Program | None:
    try:
        return program(name, m, places)
    except ValueError:
        return None  # The schedule wants another placement.


def mean_costs(cells: Sequence[Span], count: int) -> Costs:
    """Return the mean seconds of each kind of action in each partition, over ``count`` micro-batches."""
    has_halves = _has_halves(cells)
    recomputed = {(span.step, span.micro_batch, span.partition) for span in cells if span.kind == "recomputation"}
    totals: dict[tuple[str, int], float] = {}

    def add(kinds: str, j: int, seconds: float) -> None:
        for kind in kinds:
            totals[kind, j] = totals.get((kind, j), 0.0) + seconds / count

    for span in cells:
        j, seconds = span.partition, span.seconds
        if span.kind == "forward":
            add("F", j, seconds)
        elif span.kind == "backward of the weights":
            add("BW", j, seconds)
        elif span.kind == "backward" and not has_halves and (span.step, span.micro_batch, j) not in recomputed:
            add("B", j, seconds)
            add("IW", j, seconds / 2)
        else:
            add("BI", j, seconds)
    return totals


def _has_halves(cells: Sequence[Span]) -> bool:
    return any(span.kind in ("backward of the input", "backward of the weights") for span in cells)


def table(predictions: Sequence[Prediction], cells: Sequence[Span], seconds: float, bubble: float) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        predictions: the predictions, at least one
        cells: the recorded cells
        seconds: the measured time of a step
        bubble: the measured bubble
    """
    yield _row("step under", "time", "bubble", "live micro-batches")
    yield _row("(as recorded)", milliseconds(seconds), percent(bubble))
    for prediction in predictions:
        name = prediction.schedule or "your program"
        live = f"{prediction.live:.1f}".removesuffix(".0")
        yield _row(
            f"{name}{', which ran' if prediction.ran else ''}",
            milliseconds(prediction.seconds),
            percent(prediction.bubble),
            live,
        )
    recomputations = " and recomputations" if any(span.kind == "recomputation" for span in cells) else ""
    yield f"simulated with the mean times of the recorded cells{recomputations}; copies take no time"
    names = [prediction.schedule for prediction in predictions]
    if not _has_halves(cells) and not set(names).isdisjoint(SPLITTING):
        yield "backward was recorded whole: either half of it is taken to need half of its time"
    missing = [name for name in RESIDENT if name not in names]
    if missing:
        yield f"with other devices: {', '.join(missing)}"


def _row(name: str, time: str, bubble: str, live: str = "") -> str:
    return f"{name:<26}{time:>12}{bubble:>12}{live:>22}".rstrip()
