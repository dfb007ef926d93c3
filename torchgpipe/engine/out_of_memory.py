"""What an error says when memory runs out: where the schedule was, what was alive, and what would take less memory.

The text is made from the program alone, once an action has failed; until then it costs nothing. A remedy is named only
if, by the numbers of the programs, less would be alive than when memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from torchgpipe.devices.memory import memory_in_use, ran_out_of_memory, shown_size
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.model.views import views_of_each
from torchgpipe.schedule import NAMES, Action, Program, Schedule, ScheduleName, places_of, program
from torchgpipe.schedule.position import at_once, in_one_piece, peak_of, position_of
from torchgpipe.schedule.programs import fill_drain

__all__ = ["MiniBatchFacts", "add_shortage", "facts_of", "rows_of_largest"]


class MiniBatchFacts(NamedTuple):
    """What the text is made from. It has no tensors, so it may live as long as the caller's graph.

    Attributes:
        m: the number of micro-batches
        rows: the rows of the largest micro-batch
        devices: the device of each partition
        names: the name of each partition
        schedule: the schedule; None where the autograd engine runs backward
        program: the actions of each device
        backward: whether backward runs
        stops: for each partition, how many micro-batches, from the first on, keep only its input until their backward
        partly: whether a partition recomputes some of its layers or modules only, and so keeps more than its input
        splits: whether a split backward leaves something for W, in cells that are not recomputed
        advises: if nothing is recomputed, the function whose argument ``checkpoint`` the text recommends; None if some
            layers are recomputed already, or if that argument would have no effect
    """

    m: int
    rows: int
    devices: Sequence[torch.device]
    names: Sequence[str]
    schedule: Schedule | None
    program: Program
    backward: bool
    stops: Sequence[int]
    partly: bool
    splits: bool
    advises: Literal["GPipe", "pipelined"] | None


def facts_of(
    views: Sequence[Partition],
    devices: Sequence[torch.device],
    m: int,
    rows: int,
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
        rows: the rows of the largest micro-batch
        stops: for each view, how many micro-batches, from the first on, may be recomputed
        schedule: the schedule; None where the autograd engine runs backward
        program: the actions of each device; None where the autograd engine runs backward
        backward: whether backward runs
    """
    own = views_of_each(views)
    places = [devices[ks[0]] for ks in own]
    least = [min([stops[k] for k in ks]) for ks in own]
    partly = any(max([stops[k] for k in ks]) > stop for ks, stop in zip(own, least))
    off = backward and views[0].training and not any(stops)
    names = [f"partition {j}" for j in range(len(own))]
    actions = fill_drain(m, places_of(places)) if program is None else program
    advises: Literal["GPipe"] | None = "GPipe" if off else None
    return MiniBatchFacts(
        m, rows, places, names, schedule, actions, backward, least, partly=partly, splits=True, advises=advises
    )


def add_shortage(error: BaseException, facts: Callable[[], MiniBatchFacts], action: Action) -> None:
    """Add a note to an error that says that memory has run out, and nothing to other errors.

    Args:
        error: the error
        facts: returns what the note is made from
        action: the action that has failed, in terms of partitions
    """
    if ran_out_of_memory(error):
        note = "\n  ".join(_Shortage(facts(), action).lines())
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


class _Shortage:
    """The text about one action that has failed."""

    def __init__(self, facts: MiniBatchFacts, action: Action) -> None:
        self._facts = facts
        self._action = action
        self._device = facts.devices[action.j]
        self._places = places_of(facts.devices)
        #: The partitions on this device.
        self._there = [j for j, place in enumerate(self._places) if place == self._places[action.j]]
        self._unit = "micro-batches" if len(self._there) == 1 else "cells"
        kind, i, j = action
        is_whole = self._is_whole(facts.program, facts.m)
        # What is left of the halves of a cell that has none is B.
        there = Action("B", i, j) if kind in ("I", "W") and is_whole(i, j) else action
        self._position = position_of(in_one_piece(facts.program, is_whole), there)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the note."""
        facts, device = self._facts, self._device
        yield self._place()
        if facts.backward:
            yield self._alive()
        use = memory_in_use(device)
        if use is not None:
            allocated, reserved, total = map(shown_size, use)
            yield f"{device} has {total}: {allocated} in tensors, {reserved} reserved"
        if facts.backward:
            yield from self._other_schedule()
            yield from self._recomputation()
        yield from self._more_chunks()
        if facts.backward:
            yield (
                "torchgpipe.plan(model, sample, batch=..., memory=[...]) finds a balance, chunks, a schedule and "
                "layers to recompute that fit"
            )

    def _place(self) -> str:
        facts, action = self._facts, self._action
        ours = facts.program if facts.backward else [[one for one in own if one.kind == "F"] for own in facts.program]
        own = next(own for own in ours if action in own)
        text = f"out of memory at action {own.index(action) + 1} of {len(own)} of {self._device}"
        if not facts.backward:
            return f"{text}, without backward: {action}"
        if facts.schedule is None:
            return f"{text}, all forward and then loss.backward(): {action}"
        name = f"schedule={facts.schedule!r}" if isinstance(facts.schedule, str) else "a program of your own"
        return f"{text} under {name}: {action}"

    def _alive(self) -> str:
        position, facts = self._position, self._facts
        text = f"alive on {self._device}: {len(position.held)} of at most {position.most} {self._unit}"
        if len(self._there) > 1:
            counts = [(j, sum(cell[1] == j for cell in position.held)) for j in self._there]
            text += f" ({', '.join([f'{count} in {facts.names[j]}' for j, count in counts])})"
        small = sum(map(self._keeps_input_only(facts.program, facts.m), self._others()))
        if small:
            text += f", {small} of them with their inputs only"
        if position.waiting:
            text += f", {len(position.waiting)} of them between I and W"
        return f"{text}; recomputed layers keep only their inputs" if facts.partly else text

    def _other_schedule(self) -> Iterator[str]:
        """Yield which schedule would hold least on this device, if that is less than what was alive."""
        facts, held = self._facts, len(self._position.held)
        peaks = {}
        for name in NAMES:
            if name != (facts.schedule or "GPipe"):
                try:
                    peaks[name] = self._peak(name, facts.m)
                except ValueError:  # The partitions are placed in another way.
                    continue
        best = min(peaks, key=peaks.__getitem__, default=None)
        if best is not None and peaks[best] < held:
            how = "model.step(input, target) under " if facts.schedule is None else ""
            yield (
                f"{how}schedule={best!r} would hold at most {peaks[best]} {self._unit} on {self._device} instead of "
                f"{self._position.most}"
            )

    def _recomputation(self) -> Iterator[str]:
        facts = self._facts
        if facts.advises == "pipelined":
            yield "checkpoint=True would keep only the inputs of the parts of the spine, and recompute part by part"
        elif facts.advises == "GPipe":
            stays = at_once(facts.program)
            small = sum(i < facts.m - 1 and (i, j) not in stays for i, j in self._others())
            if small:
                yield (
                    f"checkpoint='except_last' would keep only the inputs of {small} of these "
                    f"{len(self._position.held)} {self._unit}"
                )
            else:
                yield "checkpoint=[...], with names of layers, would keep only the inputs of these layers"

    def _more_chunks(self) -> Iterator[str]:
        """Yield for how many micro-batches fewer rows would be alive, under this schedule."""
        facts, held = self._facts, len(self._position.held)
        schedule = facts.schedule or "GPipe"
        if not isinstance(schedule, str):
            return
        computes_less = not facts.backward or facts.partly or any(facts.stops[j] for j in self._there)
        for factor in (2, 4, 8):
            rows = -(-facts.rows // factor)
            if factor > facts.rows:
                return
            peak = self._peak(schedule, factor * facts.m)
            if computes_less or peak * rows < held * facts.rows:
                size = f"{rows} row{'s' * (rows > 1)}"
                text = f"chunks={factor * facts.m} would make micro-batches of {size} instead of {facts.rows}"
                yield f"{text}, and {self._device} hold at most {peak} {self._unit}" if facts.backward else text
                return

    def _peak(self, name: ScheduleName, m: int) -> int:
        """Return the most cells that this device would hold at once."""
        other = program(name, m, self._places)
        return peak_of(in_one_piece(other, self._is_whole(other, m)), self._action.j)

    def _others(self) -> list[tuple[int, int]]:
        """Return the cells that are alive, beside the one that has failed and those that wait for W."""
        busy = {(self._action.i, self._action.j), *self._position.waiting}
        return [cell for cell in self._position.held if cell not in busy]

    def _keeps_input_only(self, program: Program, m: int) -> Callable[[tuple[int, int]], bool]:
        """Return which cells keep only their inputs until their backward, if there are ``m`` micro-batches."""
        facts = self._facts
        stays = set() if facts.schedule is None and program is facts.program else at_once(program)
        stops = [m - (facts.m - stop) if stop else 0 for stop in facts.stops]
        return lambda cell: cell[0] < stops[cell[1]] and cell not in stays

    def _is_whole(self, program: Program, m: int) -> Callable[[int, int], bool]:
        small = self._keeps_input_only(program, m)
        return lambda i, j: not self._facts.splits or small((i, j))


def rows_of_largest(inputs: Sequence[Batch]) -> int:
    """Return the rows of the first micro-batch, which is the largest one; 1 if its tensors do not tell."""
    for k, leaf in enumerate(inputs[0].leaves):
        # A tensor in NoChunk is the same in all micro-batches.
        if leaf is not None and leaf.dim() and (len(inputs) == 1 or leaf is not inputs[1].leaves[k]):
            return len(leaf)
    return 1
