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


def described(question: Question, alternative: Alternative) -> str:
    """Return an alternative in a line."""
    chunks, choice = alternative.chunks, alternative.choice
    recomputed = f"{len(choice.recomputed)} of {len(question.costs.layers)} layers" if choice.recomputed else "nothing"
    return (
        f"schedule={alternative.schedule!r}, chunks={chunks} ({_count(rows_of(question.batch, chunks), 'row')}), "
        f"balance={list(choice.balance)}, {recomputed} recomputed"
    )


def _decision(plan: Plan) -> Iterator[str]:
    question, best, costs = plan.question, plan.best, plan.question.costs
    yield from _wrapped(headline(plan))
    if costs.has_times:
        ran = f", and took {_milliseconds(best.measured)}" if best.measured else ""
        yield f"a step is predicted to take {_milliseconds(best.seconds)}, {best.bubble:.0%} of it idle{ran}"
    else:
        yield "measured on the meta device, without times: the bytes of parameters stand for them"
    states = f"gradients and the optimizer keep {question.states:g} bytes for each byte of a parameter that is trained"
    yield from _wrapped(states + ("; optimizer= tells of its states" if question.states == 1 else ""))
    rows = " and ".join(", ".join(map(str, costs.rows)).rsplit(", ", 1))
    yield from _wrapped(f"measured on {costs.where}, with micro-batches of {rows} rows; loss: {costs.loss}")


def _devices(plan: Plan, outcome: Outcome) -> list[str]:
    question, best = plan.question, plan.best
    names = [layer.name for layer in question.costs.layers]
    spans = list(pairwise(accumulate(best.choice.balance, initial=0)))
    rows = [["device", "recomputed", "busy", "state", "activations", "needs", "may use", "layers"]]
    for k, device in enumerate(question.devices):
        placed = [span for span, place in zip(spans, best.places) if place == k]
        state = outcome.state[k]
        rows.append(
            [
                device.name,
                str(sum(a <= layer < b for a, b in placed for layer in best.choice.recomputed)),
                f"{outcome.simulation.busy[k] / outcome.seconds:.0%}" if outcome.seconds else "-",
                *map(shown_size, (state, outcome.memory[k] - state, outcome.memory[k])),
                "no limit" if math.isinf(device.memory) else shown_size(device.memory),
                ", ".join([f"'{names[a]}'" if b == a + 1 else f"'{names[a]}' to '{names[b - 1]}'" for a, b in placed]),
            ]
        )
    return table(rows, words=(0, 7), indent=2)


def _alternatives(plan: Plan) -> Iterator[str]:
    count = sum(alternative.tried for alternative in plan.fitting)
    ran = sum(bool(alternative.measured) for alternative in plan.fitting)
    yield from _wrapped(
        f"simulated: {_count(count, 'balance')}, for the schedules and numbers of micro-batches below; "
        f"{ran or 'none'} of them ran"
    )
    rows = [["", "step", *["ran"] * bool(ran), "schedule", "chunks", "memory", ""]]
    for number, loser in enumerate(plan.fitting, 1):
        step = _milliseconds(loser.seconds) if plan.question.costs.has_times else "-"
        measured = [_milliseconds(loser.measured) if loser.measured else "-"] * bool(ran)
        why = "chosen" if number == 1 else _why(plan.question, plan.best, loser)
        memory = shown_size(max(loser.memory))
        rows.append([str(number), step, *measured, loser.schedule, str(loser.chunks), memory, why])
    yield from table(rows, words=(2 + bool(ran), 5 + bool(ran)))
    for misfit, excess in plan.misfits:
        lacking, device = max(zip(excess, plan.question.devices), key=lambda pair: pair[0])
        way = f"{misfit.schedule} with {misfit.chunks} chunks"
        yield f"does not fit: {way} lacks {shown_size(lacking)} on {device.name}"


def _why(question: Question, best: Alternative, loser: Alternative) -> str:
    """Say what makes the largest difference, as measured or else as predicted."""
    ran = bool(best.measured and loser.measured)
    quickest, seconds = (best.measured, loser.measured) if ran else (best.seconds, loser.seconds)
    slower = seconds / quickest - 1 if quickest else 0.0
    if slower < _SAME:
        return "as fast" if ran else "not slower by prediction, not run"
    told = f"{slower:.1%} slower" if slower < 0.0995 else f"{slower:.0%} slower"
    if loser.seconds <= best.seconds:
        return f"{told} when it ran"
    # Together the differences are the seconds that all devices take longer, so the largest is one that takes longer.
    reasons = [f"{loser.bubble:.0%} idle", f"{len(loser.choice.recomputed)} recomputed", _work(best, loser), "overhead"]
    differences = [after - before for before, after in zip(_spent(question, best), _spent(question, loser))]
    return f"{told}: {reasons[differences.index(max(differences))]}"


def _spent(question: Question, alternative: Alternative) -> list[float]:
    """Return the seconds of all devices together: idle, recomputing, working, and beside cells."""
    cells = question.costs.cells_at(rows_of(question.batch, alternative.chunks))
    bubble, working, recomputing = alternative.bubble, alternative.working, alternative.recomputing
    idle = bubble * (working + recomputing) / (1 - bubble) if bubble < 1 else math.inf
    simulated = [idle, recomputing, working]
    return [*(seconds * cells.factor for seconds in simulated), cells.step * len(question.devices)]


def _work(best: Alternative, loser: Alternative) -> str:
    """Say why devices compute longer for the same rows."""
    if loser.chunks != best.chunks:
        return f"{'smaller' if loser.chunks > best.chunks else 'larger'} micro-batches"
    if len(loser.places) > len(best.places):
        return "smaller cells"
    return "backward in halves" if loser.schedule in SPLITTING else "cells take longer"


def _binding(plan: Plan, outcome: Outcome) -> Iterator[str]:
    devices, shortest = plan.question.devices, min(alternative.seconds for alternative in plan.fitting)

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
