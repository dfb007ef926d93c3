"""A plan in words: what was chosen, what it takes, what binds it, and why the others lost."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from torchgpipe.devices.memory import shown_size
from torchgpipe.schedule.programs import SPLITTING
from torchgpipe_balancing.planning.alternatives import Alternative, Question, rows_of
from torchgpipe_balancing.planning.problem import Outcome
from torchgpipe_balancing.table import WIDTH, table

if TYPE_CHECKING:
    from torchgpipe_balancing.planning.result import Plan

__all__ = ["described", "headline", "written"]

#: Differences below this share of a step are not worth a word.
_SAME = 0.001


def written(plan: Plan) -> str:
    """Return a plan in words."""
    outcome = plan.outcome()
    parts = [_decision(plan), _devices(plan, outcome), _alternatives(plan), _binding(plan, outcome)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def headline(plan: Plan) -> str:
    """Return what was chosen, in a line."""
    question = plan.question
    return f"{question.batch} rows on {_count(len(question.devices), 'device')}: {described(question, plan.best)}"


def described(question: Question, one: Alternative) -> str:
    """Return an alternative in a line."""
    rows = rows_of(question.batch, one.chunks)
    again = len(one.choice.recomputed)
    return (
        f"schedule={one.schedule!r}, chunks={one.chunks} ({_count(rows, 'row')}), "
        f"balance={list(one.choice.balance)}, "
        + (f"{again} of {len(question.costs.layers)} layers recomputed" if again else "nothing recomputed")
    )


def _decision(plan: Plan) -> Iterator[str]:
    question, best, costs = plan.question, plan.best, plan.question.costs
    yield from _wrapped(headline(plan))
    if costs.has_times:
        ran = f", and took {_milliseconds(best.measured)}" if best.measured else ""
        yield f"a step is predicted to take {_milliseconds(best.seconds)}, {best.bubble:.0%} of it idle{ran}"
    else:
        yield "measured on the meta device, without times: the bytes of parameters stand for them"
    kept = f"gradients and the optimizer keep {question.states:g} bytes for each byte of a parameter that is trained"
    yield from _wrapped(kept + ("; optimizer= tells of its states" if question.states == 1 else ""))
    rows = " and ".join(", ".join(map(str, costs.rows)).rsplit(", ", 1))
    yield from _wrapped(f"measured on {costs.where}, with micro-batches of {rows} rows; loss: {costs.loss}")


def _devices(plan: Plan, outcome: Outcome) -> list[str]:
    question, best = plan.question, plan.best
    names = [layer.name for layer in question.costs.layers]
    spans = list(pairwise(accumulate(best.choice.balance, initial=0)))
    rows = [["device", "recomputed", "busy", "state", "activations", "needs", "may use", "layers"]]
    for k, device in enumerate(question.devices):
        own = [span for span, place in zip(spans, best.places) if place == k]
        state = sum(one.state for one, place in zip(outcome.partitions, best.places) if place == k)
        rows.append(
            [
                device.name,
                str(sum(a <= layer < b for a, b in own for layer in best.choice.recomputed)),
                f"{outcome.simulation.busy[k] / outcome.seconds:.0%}" if outcome.seconds else "-",
                *map(shown_size, (state, outcome.memory[k] - state, outcome.memory[k])),
                "no limit" if math.isinf(device.memory) else shown_size(device.memory),
                ", ".join([f"'{names[a]}'" if b == a + 1 else f"'{names[a]}' to '{names[b - 1]}'" for a, b in own]),
            ]
        )
    return table(rows, left=(0, 7), indent=2)


def _alternatives(plan: Plan) -> Iterator[str]:
    count = sum(one.tried for one in plan.fitting)
    ran = sum(bool(one.measured) for one in plan.fitting)
    yield from _wrapped(
        f"simulated: {_count(count, 'balance')}, for the schedules and numbers of micro-batches below; "
        f"{ran or 'none'} of them ran"
    )
    rows = [["", "step", *["ran"] * bool(ran), "schedule", "chunks", "memory", ""]]
    for number, one in enumerate(plan.fitting, 1):
        step = _milliseconds(one.seconds) if plan.question.costs.has_times else "-"
        measured = [_milliseconds(one.measured) if one.measured else "-"] * bool(ran)
        why = "chosen" if number == 1 else _why(plan.question, plan.best, one)
        rows.append([str(number), step, *measured, one.schedule, str(one.chunks), shown_size(max(one.memory)), why])
    yield from table(rows, left=(2 + bool(ran), 5 + bool(ran)))
    for one, excess in plan.misfits:
        device = plan.question.devices[excess.index(max(excess))].name
        yield f"does not fit: {one.schedule} with {one.chunks} chunks lacks {shown_size(max(excess))} on {device}"


def _why(question: Question, best: Alternative, other: Alternative) -> str:
    """Say what makes the largest difference, as measured or else as predicted."""
    ran = bool(best.measured and other.measured)
    seconds = (best.measured, other.measured) if ran else (best.seconds, other.seconds)
    slower = seconds[1] / seconds[0] - 1 if seconds[0] else 0.0
    if slower < _SAME:
        return "as fast" if ran else "not slower by prediction, not run"
    told = f"{slower:.1%} slower" if slower < 0.0995 else f"{slower:.0%} slower"
    if other.seconds <= best.seconds:
        return f"{told} when it ran"
    # Together the differences are the seconds that all devices take longer, so the largest is one that takes longer.
    reasons = [f"{other.bubble:.0%} idle", f"{len(other.choice.recomputed)} recomputed", _work(best, other), "overhead"]
    differences = [after - before for before, after in zip(_spent(question, best), _spent(question, other))]
    return f"{told}: {reasons[differences.index(max(differences))]}"


def _spent(question: Question, one: Alternative) -> list[float]:
    """Return the seconds of all devices together: idle, recomputing, working, and beside cells."""
    cells, busy = question.costs.cells_at(rows_of(question.batch, one.chunks)), one.working + one.recomputing
    idle = one.bubble * busy / (1 - one.bubble) if one.bubble < 1 else math.inf
    simulated = [idle, one.recomputing, one.working]
    return [*(seconds * cells.factor for seconds in simulated), cells.step * len(question.devices)]


def _work(best: Alternative, other: Alternative) -> str:
    """Say why devices compute longer for the same rows."""
    if other.chunks != best.chunks:
        return f"{'smaller' if other.chunks > best.chunks else 'larger'} micro-batches"
    if len(other.places) > len(best.places):
        return "smaller cells"
    return "backward in halves" if other.schedule in SPLITTING else "cells take longer"


def _binding(plan: Plan, outcome: Outcome) -> Iterator[str]:
    devices, shortest = plan.question.devices, min(one.seconds for one in plan.fitting)

    def saved(seconds: float) -> str:
        return f"{max(0.0, 1 - seconds / shortest):.1%}"

    if plan.without_limits < shortest * (1 - _SAME):
        tight = min(range(len(devices)), key=lambda k: (devices[k].memory - plan.best.memory[k], k))
        yield from _wrapped(
            f"what binds: the memory, most of all of {devices[tight].name}; without limits a step would take "
            f"{saved(plan.without_limits)} less"
        )
        yield f"one GiB more on each device would save {saved(plan.with_more_memory)} of a step"
    else:
        name = devices[outcome.simulation.busy.index(max(outcome.simulation.busy))].name
        yield f"what binds: the time of {name}, which works longest; more memory would save nothing"
    if plan.question.costs.has_times:
        yield f"one more device like {devices[-1].name} would save {saved(plan.with_one_more_device)} of a step"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
