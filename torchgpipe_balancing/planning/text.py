"""A plan in words: what was chosen, what each device needs, and the other candidates."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from torchgpipe.devices.memory import shown_size
from torchgpipe_balancing.planning.candidates import Candidate, PlanInput, least_seconds, rows_of
from torchgpipe_balancing.planning.problem import Outcome
from torchgpipe_balancing.table import WIDTH, table

__all__ = ["describe", "describe_plan", "write_plan"]


def write_plan(given: PlanInput, fitting: Sequence[Candidate], usual: Candidate | None, outcome: Outcome) -> str:
    """Return a plan in words.

    Args:
        given: what was planned for
        fitting: the candidates that fit, the chosen one first
        usual: the best one under 1F1B
        outcome: what the chosen one costs
    """
    best = fitting[0]
    usual = next((one for one in fitting if one.schedule == "1F1B" and one.measured), usual)
    parts = [_decision(given, best, usual), _devices(given, best, outcome), _candidates(given, fitting)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def describe_plan(given: PlanInput, chosen: Candidate) -> str:
    """Return what was chosen, in a line."""
    return f"{given.batch} rows on {_count(len(given.devices), 'device')}: {describe(given, chosen)}"


def describe(given: PlanInput, candidate: Candidate) -> str:
    """Return a candidate in a line."""
    chunks, choice = candidate.chunks, candidate.choice
    sizes = f"chunks={chunks} ({_count(rows_of(given.batch, chunks), 'row')}), "
    recomputed = f"{len(choice.recomputed)} of {len(given.costs.layers)} layers" if choice.recomputed else "nothing"
    times = "" if candidate.fitted is None else " at these times"
    return f"schedule={candidate.schedule!r}{times}, {sizes}balance={list(choice.balance)}, {recomputed} recomputed"


def _decision(given: PlanInput, best: Candidate, usual: Candidate | None) -> Iterator[str]:
    costs = given.costs
    yield from _wrapped(describe_plan(given, best))
    if costs.has_times:
        ran = f", and took {_milliseconds(best.measured)}" if best.measured else ""
        yield f"a step is predicted to take {_milliseconds(best.seconds)}, {best.bubble:.0%} of it idle{ran}"
        both_ran = usual is not None and usual.measured and best.measured
        times = (usual.measured / best.measured if both_ran else usual.seconds / best.seconds) if usual else 0.0
        gain = f"1F1B would take {times:.2f} times as long; " if usual else ""
        more = 1 - least_seconds(given, best) / best.seconds
        yield from _wrapped(f"{gain}no other program with these partitions is quicker by more than {more:.1%}")
    else:
        yield "measured on the meta device, without times: operations stand for them"
    states = f"gradients and the optimizer keep {given.states:g} bytes for each byte of a parameter that is trained"
    yield from _wrapped(states + ("; optimizer= tells of its states" if given.states == 1 else ""))
    rows = " and ".join(", ".join(map(str, costs.rows)).rsplit(", ", 1))
    yield from _wrapped(f"measured on {costs.where}, with micro-batches of {rows} rows; loss: {costs.loss}")


def _devices(given: PlanInput, best: Candidate, outcome: Outcome) -> list[str]:
    names = [layer.name for layer in given.costs.layers]
    spans = list(pairwise(accumulate(best.choice.balance, initial=0)))
    rows = [["device", "recomputed", "busy", "state", "activations", "needs", "may use", "layers"]]
    for k, device in enumerate(given.devices):
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


def _candidates(given: PlanInput, fitting: Sequence[Candidate]) -> list[str]:
    rows = [["", "step", "ran", "schedule", "chunks", "idle", "recomputed", "memory"]]
    for number, candidate in enumerate(fitting, 1):
        rows.append(
            [
                str(number),
                _milliseconds(candidate.seconds) if given.costs.has_times else "-",
                _milliseconds(candidate.measured) if candidate.measured else "-",
                candidate.schedule,
                str(candidate.chunks),
                f"{candidate.bubble:.0%}",
                str(len(candidate.choice.recomputed)),
                shown_size(max(candidate.memory)),
            ]
        )
    return table(rows, words=(3,))


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
