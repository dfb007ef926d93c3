"""Draw a planned step as SVG, with the memory of each device over time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchgpipe.devices.memory import shown_size
from torchgpipe.schedule.drawing import COLOURS, Box, boxes_of, draw_boxes
from torchgpipe_balancing.planning.candidates import PlanInput
from torchgpipe_balancing.planning.problem import Outcome

__all__ = ["draw"]

#: The colours of what is held for backward, of what is there all the time, and of the limit.
_HELD, _STATE, _LIMIT = "#cc79a7", "#909090", "#d55e00"

#: In pixels.
_WIDTH = 720

_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "of weights"}


def draw(given: PlanInput, outcome: Outcome) -> str:
    """Draw a planned step: for each device what it does, and below it the memory that it holds.

    Args:
        given: what was planned for
        outcome: what the candidate costs that is drawn
    """
    simulation, rows = outcome.simulation, []
    for k, device in enumerate(given.devices):
        rows += [
            (device.name, boxes_of(simulation, k)),
            (shown_size(outcome.memory[k]), list(_memory(outcome, k, device.memory))),
        ]
    kinds = {action.kind for of_device in simulation.starts for action, _ in of_device}
    legend = {name: COLOURS[kind] for kind, name in _NAMES.items() if kind in kinds}
    legend |= {"activations": _HELD, "parameters, gradients, optimizer": _STATE}
    if any(math.isfinite(device.memory) for device in given.devices):
        legend["limit"] = _LIMIT
    return draw_boxes(rows, simulation.seconds, _WIDTH, legend=legend, height=32)


def _memory(outcome: Outcome, k: int, limit: float) -> Iterator[Box]:
    """Yield boxes as high as the memory that a device holds at that time."""
    state, levels = outcome.state[k], list(_levels(outcome, k))
    top = max([level for _, level in levels] + ([] if math.isinf(limit) else [limit])) or 1.0
    for (start, level), (end, _) in zip(levels, [*levels[1:], (outcome.seconds, 0.0)]):
        yield Box(start, end, "", shown_size(level), _HELD, top=1 - level / top)
    yield Box(0.0, outcome.seconds, "", shown_size(state), _STATE, top=1 - state / top)
    if not math.isinf(limit):
        yield Box(0.0, outcome.seconds, "", f"limit: {shown_size(limit)}", _LIMIT, 1 - limit / top, 1.05 - limit / top)


def _levels(outcome: Outcome, k: int) -> Iterator[tuple[float, float]]:
    """Yield the times at which the memory of a device changes, with its level from then on."""
    level = outcome.state[k]
    yield 0.0, level
    for action, start in outcome.simulation.starts[k]:
        end = start + outcome.simulation.cost(action)
        for time, change in zip((start, end), outcome.simulation.changes(action)):
            level += change
            yield time, level
