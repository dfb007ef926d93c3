"""What an error says when memory runs out: where the schedule was, what was under way, and what takes less memory.

The text is made once an action has failed; until then it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from torchgpipe.devices.memory import memory_in_use, ran_out_of_memory, shown_size
from torchgpipe.model.partition import Partition
from torchgpipe.model.views import views_of_each
from torchgpipe.schedule import Action, Program, Schedule, places_of
from torchgpipe.schedule.position import position_of
from torchgpipe.schedule.programs import fill_drain

__all__ = ["MiniBatchFacts", "add_shortage", "facts_of"]


class MiniBatchFacts(NamedTuple):
    """What the text is made from. It has no tensors, so it may live as long as the caller's graph.

    Attributes:
        devices: the device of each partition
        schedule: the schedule; None where ``loss.backward()`` runs backward
        program: the actions of each device
        backward: whether backward runs
        checkpoint: what may be given as ``checkpoint`` to recompute something, if nothing is recomputed yet
    """

    devices: Sequence[torch.device]
    schedule: Schedule | None
    program: Program
    backward: bool
    checkpoint: str | None


def facts_of(
    views: Sequence[Partition],
    devices: Sequence[torch.device],
    m: int,
    stops: Sequence[int],
    schedule: Schedule | None,
    program: Program | None,
    *,
    backward: bool,
) -> MiniBatchFacts:
    """Return what the text is made from, for a mini-batch of `GPipe`.

    Args:
        views: the layers; a partition may be divided into several views
        devices: the device of each view
        m: the number of micro-batches
        stops: for each view, how many micro-batches, from the first on, may be recomputed
        schedule: the schedule; None where the autograd engine runs backward
        program: the actions of each device; None where the autograd engine runs backward
        backward: whether backward runs
    """
    places = [devices[own[0]] for own in views_of_each(views)]
    actions = fill_drain(m, places_of(places)) if program is None else program
    recomputes = any(stops) or not views[0].training
    return MiniBatchFacts(places, schedule, actions, backward, None if recomputes else "'except_last'")


def add_shortage(error: BaseException, facts: Callable[[], MiniBatchFacts], action: Action) -> None:
    """Add a note to an error that says that memory has run out, and nothing to other errors.

    Args:
        error: the error
        facts: returns what the note is made from
        action: the action that has failed, in terms of partitions
    """
    if ran_out_of_memory(error):
        note = "\n  ".join(_lines(facts(), action))
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _lines(facts: MiniBatchFacts, action: Action) -> Iterator[str]:
    device = facts.devices[action.j]
    runs = [[one for one in own if facts.backward or one.kind == "F"] for own in facts.program]
    position = position_of(runs, action)
    by = f"schedule={facts.schedule!r}" if isinstance(facts.schedule, str) else "a program of your own"
    how = "without backward" if not facts.backward else f"under {by}" if facts.schedule else "with loss.backward()"
    yield f"out of memory at action {position.number} of {position.total} of {device}, {how}: {action}"
    if facts.backward:
        yield f"cells under way on {device}: {len(position.held)} of at most {position.most}"
    use = memory_in_use(device)
    if use is not None:
        allocated, reserved, total = map(shown_size, use)
        yield f"{device} has {total}: {allocated} in tensors, {reserved} reserved"
    remedies = ["more chunks"]
    if facts.backward:
        step = "" if facts.schedule else "model.step(input, target) under "
        remedies += [f"{step}schedule='1F1B'"] if facts.schedule in (None, "GPipe", "ZeroBubble") else []
        remedies += [] if facts.checkpoint is None else [f"checkpoint={facts.checkpoint}"]
        remedies.append("what torchgpipe.plan(model, sample, batch=..., memory=[...]) finds")
    yield f"to take less: {', or '.join(remedies)}"
