"""What an error says when memory runs out: the action that has failed, the bytes in use, and what takes less memory.

The text is made once an action has failed; until then it costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torchgpipe.devices.memory import memory_in_use, ran_out_of_memory, shown_size
from torchgpipe.model.partition import Partition
from torchgpipe.schedule import Action, Schedule

__all__ = ["MiniBatchFacts", "add_shortage", "facts_of"]


class MiniBatchFacts(NamedTuple):
    """What the text is made from. It has no tensors, so it may live as long as the caller's graph.

    Attributes:
        schedule: the schedule; None where ``loss.backward()`` runs backward
        backward: whether backward runs
        checkpoint: what may be given as ``checkpoint`` to recompute something, if nothing is recomputed yet
    """

    schedule: Schedule | None
    backward: bool
    checkpoint: str | None


def facts_of(
    schedule: Schedule | None, views: Sequence[Partition], checkpointed: Sequence[int], *, backward: bool
) -> MiniBatchFacts:
    """Return what the text is made from, for a mini-batch of `GPipe`.

    Args:
        schedule: the schedule; None where the autograd engine runs backward
        views: the layers
        checkpointed: for each view, how many micro-batches, from the first on, may be recomputed
        backward: whether backward runs
    """
    recomputes = any(checkpointed) or not views[0].training
    return MiniBatchFacts(schedule, backward, None if recomputes else "'except_last'")


def add_shortage(error: BaseException, facts: MiniBatchFacts, action: Action, device: torch.device) -> None:
    """Add a note to an error that says that memory has run out, and nothing to other errors.

    Args:
        error: the error
        facts: what the note is made from
        action: the action that has failed, in terms of partitions
        device: the device of that partition
    """
    if ran_out_of_memory(error):
        note = "\n  ".join(_lines(facts, action, device))
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _lines(facts: MiniBatchFacts, action: Action, device: torch.device) -> Iterator[str]:
    by = f"schedule={facts.schedule!r}" if isinstance(facts.schedule, str) else "a program of your own"
    how = "without backward" if not facts.backward else f"under {by}" if facts.schedule else "with loss.backward()"
    yield f"out of memory in {action} on {device}, {how}"
    use = memory_in_use(device)
    if use is not None:
        allocated, reserved, total = map(shown_size, use)
        yield f"{device} has {total}: {allocated} in tensors, {reserved} reserved"
    remedies = ["smaller micro-batches (more chunks)"]
    if facts.backward:
        step = "" if facts.schedule else "model.step(input, target) under "
        remedies += [f"{step}schedule='1F1B'"] if facts.schedule in (None, "GPipe", "ZeroBubble") else []
        remedies += [] if facts.checkpoint is None else [f"checkpoint={facts.checkpoint}"]
        remedies.append("what torchgpipe.plan(model, sample, batch=..., memory=[...]) finds")
    yield f"to take less: {', or '.join(remedies)}"
