"""A plan in words: what was chosen, what it takes, what binds it, and why the others lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from torchgpipe.devices.memory import shown_size
from torchgpipe.schedule.programs import SPLITTING
from torchgpipe_balancing.planning.alternatives import Alternative, Question, rows_of
from torchgpipe_balancing.planning.problem import Outcome

if TYPE_CHECKING:
    from torchgpipe_balancing.planning.result import Plan

__all__ = ["described", "written"]

#: Differences below this share of a step are not worth a word.
_SAME = 0.001


def written(plan: Plan) -> str:
    """Return a plan in words."""
    return "\n".join(_lines(plan))


def described(question: Question, one: Alternative) -> str:
    """Return an alternative in a line."""
    rows = rows_of(question.batch, one.chunks)
    again = len(one.choice.recomputed)
    return (
        f"schedule={one.schedule!r}, chunks={one.chunks} ({_count(rows, 'row')}), "
        f"balance={list(one.choice.balance)}, "
        + (f"{again} of {len(question.costs.layers)} layers recomputed" if again else "nothing recomputed")
    )


def _lines(plan: Plan) -> Iterator[str]:
    question, best, outcome = plan.question, plan.best, plan.outcome()
    costs = question.costs
    yield f"{question.batch} rows on {_count(len(question.devices), 'device')}: {described(question, best)}"
    if costs.has_times:
        ran = f", and took {_milliseconds(best.measured)}" if best.measured else ""
        yield f"a step is predicted to take {_milliseconds(best.seconds)}, {best.bubble:.0%} of it idle{ran}"
    else:
        yield "measured on the meta device, without times: the bytes of parameters stand for them"
    yield (
        f"gradients and the optimizer keep {question.states:g} bytes for each byte of a parameter that is trained"
        + ("; optimizer= tells of its states" if question.states == 1 else "")
    )
    yield f"measured on {costs.where}, with micro-batches of {_listed(costs.rows)} rows; loss: {costs.loss}"
    yield ""
    yield from _devices(plan, outcome)
    yield ""
    yield from _alternatives(plan)
    yield ""
    yield from _binding(plan, outcome)


def _devices(plan: Plan, outcome: Outcome) -> Iterator[str]:
    question, best = plan.question, plan.best
    names = [layer.name for layer in question.costs.layers]
    cuts = list(accumulate(best.choice.balance, initial=0))
    rows = [("device", "layers", "recomputed", "busy", "state", "activations", "needs", "may use")]
    for k, device in enumerate(question.devices):
        own = [(a, b) for (a, b), place in zip(pairwise(cuts), best.places) if place == k]
        again = sum(any(a <= layer < b for a, b in own) for layer in best.choice.recomputed)
        state = sum(one.state for one, place in zip(outcome.partitions, best.places) if place == k)
        rows.append(
            (
                device.name,
                ", ".join([f"'{names[a]}'" if b == a + 1 else f"'{names[a]}' to '{names[b - 1]}'" for a, b in own]),
                str(again),
                f"{outcome.simulation.busy[k] / outcome.seconds:.0%}" if outcome.seconds else "-",
                shown_size(state),
                shown_size(outcome.memory[k] - state),
                shown_size(outcome.memory[k]),
                "no limit" if math.isinf(device.memory) else shown_size(device.memory),
            )
        )
    yield from _table(rows, 2)


def _alternatives(plan: Plan) -> Iterator[str]:
    count = sum(one.tried for one in plan.fitting)
    timed = sum(bool(one.measured) for one in plan.fitting)
    yield (
        f"simulated: {_count(count, 'balance')}, for the schedules and numbers of micro-batches below; "
        f"{timed or 'none'} of them ran"
    )
    ran = any(one.measured for one in plan.fitting)
    rows = [
        ("", "step", *["measured"] * ran, "schedule", "chunks", "balance", "recomputed", "idle", "largest memory", "")
    ]
    best = plan.best
    for number, one in enumerate(plan.fitting, 1):
        rows.append(
            (
                str(number),
                _milliseconds(one.seconds) if plan.question.costs.has_times else "-",
                *([_milliseconds(one.measured) if one.measured else "-"] * ran),
                one.schedule,
                str(one.chunks),
                ",".join(map(str, one.choice.balance)),
                str(len(one.choice.recomputed)),
                f"{one.bubble:.0%}",
                shown_size(max(one.memory)),
                "chosen" if number == 1 else _why(best, one),
            )
        )
    yield from _table(rows, 0, left=(2 + ran, 4 + ran, 8 + ran))
    for one, excess in plan.misfits[:3]:
        yield (
            f"does not fit: {one.schedule} with {one.chunks} chunks lacks {shown_size(max(excess))} on "
            f"{plan.question.devices[list(excess).index(max(excess))].name}"
        )


def _why(best: Alternative, other: Alternative) -> str:
    """Say what makes the largest difference, as measured or else as predicted."""
    ran = bool(best.measured and other.measured)
    seconds = (best.measured, other.measured) if ran else (best.seconds, other.seconds)
    slower = seconds[1] / seconds[0] - 1 if seconds[0] else 0.0
    if slower < _SAME:
        return "as fast" if ran else "predicted to be no slower, not run"
    if other.seconds <= best.seconds:
        return f"{slower:.1%} slower when it ran"

    def idle(one: Alternative) -> float:
        return one.bubble * (one.working + one.recomputing) / (1 - one.bubble) if one.bubble < 1 else math.inf

    differences = {
        "more idle time": idle(other) - idle(best),
        "more recomputation": other.recomputing - best.recomputing,
        _work(best, other): other.working - best.working,
    }
    reason = max(differences, key=differences.__getitem__)
    return f"{slower:.1%} slower: {reason}"


def _work(best: Alternative, other: Alternative) -> str:
    """Say why devices compute longer for the same rows."""
    if other.chunks != best.chunks:
        return f"{'smaller' if other.chunks > best.chunks else 'larger'} micro-batches compute longer"
    if len(other.places) > len(best.places):
        return "smaller cells compute longer"
    return "backward in two halves computes longer" if other.schedule in SPLITTING else "cells compute longer"


def _binding(plan: Plan, outcome: Outcome) -> Iterator[str]:
    question, best = plan.question, plan.best
    shortest = min(one.seconds for one in plan.fitting)

    def saved(seconds: float) -> str:
        return f"{max(0.0, 1 - seconds / shortest):.1%}"

    if plan.without_limits < shortest * (1 - _SAME):
        tight = min(range(len(question.devices)), key=lambda k: (question.devices[k].memory - best.memory[k], k))
        yield (
            f"what binds: the memory, most of all of {question.devices[tight].name}; without limits a step would take "
            f"{saved(plan.without_limits)} less"
        )
        yield f"one GiB more on each device would save {saved(plan.with_more_memory)} of a step"
    else:
        slowest = max(range(len(question.devices)), key=outcome.simulation.busy.__getitem__)
        name = question.devices[slowest].name
        yield f"what binds: the time of {name}, which works longest; more memory would save nothing"
    if question.costs.has_times:
        yield (
            f"one more device like {question.devices[-1].name} would save {saved(plan.with_one_more_device)} of a step"
        )


def _table(rows: Sequence[Sequence[str]], indent: int, left: Sequence[int] = (0, 1)) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [
            cell.ljust(width) if k in left else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths))
        ]
        yield (" " * indent + "  ".join(cells)).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(numbers: Sequence[int]) -> str:
    texts = list(map(str, numbers))
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
