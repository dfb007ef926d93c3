"""Arranging a module: from a sample to its spine, its partitions, and the settings to run it with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batch.inputs import Arguments
from torchgpipe.model.settings import verify_names
from torchgpipe.processes.processes import Processes
from torchgpipe.spine.layout import Layout, Part, PartitionLayout
from torchgpipe.spine.sample import Study, study
from torchgpipe.spine.settings import Settings, find_door, iterate_tensors, name_of
from torchgpipe.spine.spine import Spine, Trace

__all__ = ["arrange"]

#: How often the sample runs to measure times.
_ROUNDS = 3


def arrange(
    module: nn.Module,
    sample: Arguments,
    devices: Sequence[torch.device],
    *,
    fixed: bool,
    balance: str | Sequence[int] | Mapping[str, int],
    no_chunk: Collection[str],
    checkpoint: bool | Collection[str],
    apart: bool = False,
    studied: Study | None = None,
    splits: bool = True,
    processes: Processes | None = None,
    **settings: Any,
) -> Settings:
    """Return the settings of a module.

    Args:
        module: the module
        sample: the arguments of one micro-batch
        devices: the device of each partition
        fixed: whether there must be a partition for each device; if not, a short spine leaves the last ones out
        balance: as for `pipelined`
        no_chunk: as for `pipelined`
        checkpoint: as for `pipelined`
        apart: whether every partition is a column of its own; otherwise neighbours on one device are one column
        splits: whether mini-batches are split
        processes: the processes, if there are several; ``owners`` is the rank of each partition then
        studied: what the sample has shown before; without it the sample runs, which a module on several devices cannot
        **settings: the other settings

    Raises:
        ValueError: the spine is shorter than the partitions, or the balance or ``checkpoint`` does not fit it.
    """
    begins = list(balance) if isinstance(balance, Mapping) else []
    studied = studied or study(module, sample, no_chunk, rounds=_ROUNDS if balance == "time" else 1, splits=splits)
    traces = studied.traces
    if studied.on_meta and balance == "time":
        balance = "parameters"  # Nothing computes there.
    spine = Spine(module, traces[0], len(devices)).parts(begins)
    if not fixed:
        devices = devices[: max(1, len(spine))]
    n = len(devices)
    for part, *seconds in zip(spine, *[_seconds(spine, traced) for traced in traces]):
        part.seconds = min(seconds)
    if len(spine) < n:
        raise ValueError(_too_short(spine, n))
    counts = _counts(module, spine, n, balance)
    if processes is not None:  # Which measure other times.
        processes.verify_alike({"model": [part.name for part in spine]}, "the partitions")
        counts = processes.gather(counts, "the partitions")[0]
    rest = iter(spine)
    partitions = [PartitionLayout(device, tuple(islice(rest, count))) for device, count in zip(devices, counts)]
    columns = _columns(partitions, apart=apart)
    doors = _Doors(module, traces[0], partitions, columns)
    recomputed = doors.recomputed(checkpoint)
    names = doors.coarser() | recomputed
    return Settings(
        devices=[devices[members[0]] for members in columns],
        members=columns,
        labels=[_label(partitions, members) for members in columns],
        parts=[[part.name for j in members for part in partitions[j].parts] for members in columns],
        doors=names,
        homes=doors.homes(names),
        again=doors.again(names),
        users={} if processes is None else doors.users(names),
        processes=processes,
        recomputed={*recomputed},
        study=replace(studied, traces=[]),
        layout=Layout(partitions, _tied(module)),
        **settings,
    )


def _seconds(spine: list[Part], traced: Trace) -> list[float]:
    """Return the time of each part. A later call of a module counts for the part that the model has reached."""
    places = {name: k for k, part in enumerate(spine) for name in part.modules}
    seconds, k, end = [0.0] * len(spine), 0, -1
    for call in traced.calls:
        if call.name in places and call.start > end:
            k, end = max(k, places[call.name]), call.end
            seconds[k] += call.seconds
    return seconds


def _too_short(spine: list[Part], n: int) -> str:
    if not spine:
        return (
            "there is nothing to split: the model is a single layer, or calls no module with parameters but within a "
            "compiled function; wrap it in a module whose forward calls several, and compile these, block.compile()"
        )
    names = ", ".join([f"'{part.name}'" for part in spine])
    largest = max(spine, key=lambda part: part.parameters)
    why = "which cannot be opened"
    if largest.again:
        why = (
            f"whose modules cannot be kept apart, as '{largest.again}' is called again after others, and has more than "
            "weights: buffers or attributes that may change, or a forward of its own, as by torch.compile(module); for "
            "later calls, take another module that shares the weights, or functional.linear(x, self.head.weight)"
        )
    return (
        f"the spine of the model has {len(spine)} parts that can be kept apart ({names}), fewer than the {n} "
        f"partitions; the largest is '{largest.name}', {why}; or ask for {len(spine)} partitions"
    )


def _counts(
    module: nn.Module, spine: list[Part], n: int, balance: str | Sequence[int] | Mapping[str, int]
) -> list[int]:
    """Return the number of parts in each partition."""
    if isinstance(balance, str):
        from torchgpipe_balancing.partition import partition

        costs = {"time": "seconds", "parameters": "parameters", "size": "size"}
        if balance not in costs:
            raise ValueError(
                f"balance must be one of {', '.join(map(repr, costs))}, a list of counts, or a dict of names, but got "
                f"{balance!r}"
            )
        return partition([getattr(part, costs[balance]) for part in spine], n)
    if isinstance(balance, Mapping):
        bare = {name for name, child in module.named_modules() if next(child.parameters(), None) is None}
        return _counts_of_names(spine, n, {name: j for name, j in balance.items() if name not in bare})
    counts = list(balance)
    if len(counts) != n or sum(counts) != len(spine) or min(counts) < 1:
        raise ValueError(
            f"balance must have {n} positive counts that add up to {len(spine)}, the parts of the spine, but got "
            f"{counts}; the parts are {[part.name for part in spine]}; balance='time' measures them, and "
            "torchgpipe.plan decides on chunks and schedule, too"
        )
    return counts


def _counts_of_names(spine: list[Part], n: int, balance: Mapping[str, int]) -> list[int]:
    """Return the number of parts in each partition: it begins at the first part that is named for it."""
    parts = [part.name for part in spine]
    named: dict[int, int] = {}
    begins = [0, *[len(spine)] * (n - 1)]
    for name, j in sorted(balance.items(), key=lambda item: len(item[0])):  # an inner name counts more
        within = [
            k for k, part in enumerate(spine) if any(f"{module}.".startswith(f"{name}.") for module in part.modules)
        ]
        if not within:
            raise ValueError(f"balance names '{name}', which is no part of the spine; the parts are {parts}")
        begins[j] = min(begins[j], within[0])
        named.update(dict.fromkeys(within, j))
    counts = [b - a for a, b in zip(begins, [*begins[1:], len(spine)])]
    if min(counts) < 1:
        raise ValueError(
            f"balance must name where each of {n} partitions but the first begins, in the order of the spine, but got "
            f"{dict(balance)}; the parts are {parts}"
        )
    for k, j in named.items():
        if not begins[j] <= k < begins[j] + counts[j]:
            raise ValueError(
                f"balance puts '{parts[k]}' into partition {j}, which is '{parts[begins[j]]}' to "
                f"'{parts[begins[j] + counts[j] - 1]}': a partition has neighbours in the order of the spine, {parts}"
            )
    return counts


def _columns(partitions: Sequence[PartitionLayout], *, apart: bool) -> list[list[int]]:
    """Return the partitions of each column: neighbours on one device are one column, unless they are kept apart."""
    columns = [[0]]
    for j in range(1, len(partitions)):
        if apart or partitions[j].device != partitions[j - 1].device:
            columns.append([])
        columns[-1].append(j)
    return columns


def _label(partitions: Sequence[PartitionLayout], members: Sequence[int]) -> str:
    first, last = partitions[members[0]], partitions[members[-1]]
    return f"{name_of(members)} (modules '{first.parts[0].name}'..'{last.parts[-1].name}') on {first.device}"


class _Doors:
    """Doors in front of the spine of a model.

    Args:
        module: the model
        traced: what a run of it has shown
        partitions: the partitions of the spine
        columns: the partitions of each column
    """

    def __init__(
        self, module: nn.Module, traced: Trace, partitions: Sequence[PartitionLayout], columns: Sequence[Sequence[int]]
    ) -> None:
        self._module, self._traced = module, traced
        #: For each module of the spine, its column.
        self._columns = {
            name: column
            for column, members in enumerate(columns)
            for j in members
            for part in partitions[j].parts
            for name in part.modules
        }
        entered = [call for call in traced.calls if call.name in self._columns]
        self._times = [0, *[call.start for call in entered]]
        #: The column that the run had reached at each of these times.
        self._reached = [*accumulate([self._columns[call.name] for call in entered], max, initial=0)]

    def _column_at(self, time: int) -> int:
        """Return the column that a run has reached at a time of the trace."""
        return self._reached[bisect_right(self._times, time) - 1]

    def again(self, doors: Mapping[str, int]) -> set[str]:
        """Return the names of those of ``doors`` that a run calls again in a later column."""
        calls = [call for call in self._traced.calls if call.name in doors]
        return {call.name for call in calls if doors[call.name] < self._column_at(call.start)}

    def homes(self, doors: Mapping[str, int]) -> dict[str, int]:
        """Return the column of each parameter and buffer outside of ``doors``: that in which it is first used."""
        return {
            name: self._column_at(self._traced.used.get(tensor, [0])[0])
            for name, _, _, tensor in iterate_tensors(self._module)
            if find_door(name, doors) is None
        }

    def users(self, doors: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the columns that use each parameter: those of the doors in front of it, and of the glue that does."""
        named = list(self._module.named_parameters(remove_duplicate=False))
        users: dict[Tensor, set[int]] = {}
        for name, parameter in named:
            used = {self._column_at(time) for time in self._traced.used.get(parameter, ())}
            door = find_door(name, doors)
            users.setdefault(parameter, used).update([] if door is None else [doors[door]])
        return {name: sorted(users[parameter]) or [0] for name, parameter in named}

    def coarser(self) -> dict[str, int]:
        """Return fewer doors: where all within a module lead to one column, a door of the module replaces them."""
        of_calls: dict[int, set[int]] = {}
        of_modules: dict[str, set[int]] = {}
        for call in reversed(self._traced.calls):  # inner calls first
            is_door = call.name in self._columns
            inside = [{self._columns[call.name]}] if is_door else [of_calls[inner.start] for inner in call.inner]
            of_calls[call.start] = set().union(*inside)
            of_modules.setdefault(call.name, set()).update(of_calls[call.start])
        result: dict[str, int] = {}
        pending = [*self._traced.calls[0].inner]
        while pending:
            call = pending.pop(0)
            if len(of_modules[call.name]) == 1:
                (result[call.name],) = of_modules[call.name]
            elif call.name not in self._columns:
                pending[:0] = call.inner
        return result

    def recomputed(self, checkpoint: bool | Collection[str]) -> dict[str, int]:
        """Return the modules that run again at backward, each with its column."""
        if checkpoint == "except_last":
            raise ValueError(
                "checkpoint='except_last' is for GPipe; a pipelined model recomputes modules, in all micro-batches: "
                "give 'always', 'never', or the names of modules to recompute"
            )
        if isinstance(checkpoint, bool) or checkpoint in ("always", "never", None):
            return dict(self._columns) if checkpoint in (True, "always") else {}
        names = verify_names("checkpoint", checkpoint)
        modules = dict(self._module.named_modules())
        unknown = [name for name in names if name not in modules]
        if unknown:
            raise ValueError(
                f"checkpoint names {unknown}, but takes 'always', 'never', or names of modules, such as the parts of "
                f"the spine: {[*self._columns]}"
            )
        columns = {name: self._columns_of(name) for name in names}
        across = [name for name in names if len(columns[name]) != 1]
        if across:
            raise ValueError(
                f"checkpoint names {across}, which lie in several partitions or in none; name modules within one "
                f"partition: {[*self._columns]}"
            )
        return {name: next(iter(columns[name])) for name in names}

    def _columns_of(self, name: str) -> set[int]:
        """Return the columns of a module: that of the door in front of it, or those of the doors within."""
        door = find_door(name, self._columns)
        if door is not None:
            return {self._columns[door]}
        return {column for inner, column in self._columns.items() if inner.startswith(f"{name}.")}


def _tied(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several; not those that its module gives it by having several."""
    places: dict[Tensor, list[str]] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(prefix, recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append(name)
    return [tuple(names) for names in places.values() if len(names) > 1]
