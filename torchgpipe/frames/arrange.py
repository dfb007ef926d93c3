"""Arranging a module: from a sample to its spine, its partitions, and the settings to run it with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.frames.inputs import Arguments
from torchgpipe.frames.layout import Layout, PartitionLayout, SpinePart
from torchgpipe.frames.sample import Study, study
from torchgpipe.frames.settings import Settings, door_of
from torchgpipe.frames.spine import Part, Trace, spine_of
from torchgpipe.model.values import dotted

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
    found: Study | None = None,
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
        found: what the sample has shown before; without it the sample runs, which a module on several devices cannot
        **settings: the other settings

    Raises:
        ValueError: the spine is shorter than the partitions, or the balance or ``checkpoint`` does not fit it.
    """
    began = balance if isinstance(balance, Mapping) else {}
    found = found or study(module, sample, no_chunk, rounds=_ROUNDS if balance == "time" else 1)
    traces = found.traces
    if found.on_meta and balance == "time":
        balance = "parameters"  # Nothing computes there.
    spine = spine_of(module, traces[0], len(devices), list(began))
    if not fixed:
        devices = devices[: max(1, len(spine))]
    n = len(devices)
    for part in spine:
        part.seconds = min([one.seconds(part.modules.values()) for one in traces])
    if len(spine) < n:
        raise ValueError(_too_short(spine, n))
    counts = _counts(module, spine, n, balance)
    parts = _divided(spine, counts)
    columns = [*range(n)] if apart else _columns(devices)
    doors = {name: columns[j] for j, own in enumerate(parts) for part in own for name in part.modules}
    names = {child: name for name, child in module.named_modules()}
    homes = _homes(module, traces[0], doors, names)
    _verify_kept(traces[0], doors, names)
    _verify_drawn(traces[0], doors, names)
    recomputed = _recomputed(names.values(), doors, checkpoint)
    doors = _coarser(module, traces[0], doors, names) | {
        name: next(doors[own] for own in doors if f"{name}.".startswith(f"{own}.") or f"{own}.".startswith(f"{name}."))
        for name in recomputed
    }
    layout = Layout(
        [
            PartitionLayout(
                device, tuple([SpinePart(part.name, part.parameters, part.size, part.seconds) for part in own])
            )
            for device, own in zip(devices, parts)
        ],
        _tied(module),
    )
    return Settings(
        devices=[device for j, device in enumerate(devices) if j == 0 or columns[j] != columns[j - 1]],
        labels=_labels(layout, columns),
        parts=[
            [part.name for j, own in enumerate(parts) if columns[j] == column for part in own]
            for column in range(columns[-1] + 1)
        ],
        doors=doors,
        homes=homes,
        recomputed=recomputed,
        splitter=found.splitter,
        kinds=found.kinds,
        counted=traces[0].labels or ("labels", -100),
        shifts=found.shifts,
        takes_items=found.takes_items,
        draws_elsewhere=found.draws_elsewhere,
        epsilon=traces[0].epsilon,
        on_meta=found.on_meta,
        keeps_tensors=any([one.keeps_tensors for one in traces]),
        layout=layout,
        **settings,
    )


def _too_short(spine: list[Part], n: int) -> str:
    if not spine:
        return (
            "there is nothing to split: the model is a single layer, or calls no module with parameters; wrap it in a "
            "module whose forward calls several"
        )
    names = ", ".join([f"'{part.name}'" for part in spine])
    largest = max(spine, key=lambda part: part.parameters)
    return (
        f"the spine of the model has {len(spine)} parts that can be kept apart ({names}), fewer than the {n} "
        f"partitions; the largest is '{largest.name}', which cannot be opened; ask for {len(spine)} partitions"
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
        found = [k for k, part in enumerate(spine) if any(f"{own}.".startswith(f"{name}.") for own in part.modules)]
        if not found:
            raise ValueError(f"balance names '{name}', which is no part of the spine; the parts are {parts}")
        begins[j] = min(begins[j], found[0])
        named.update(dict.fromkeys(found, j))
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


def _divided(spine: list[Part], counts: Sequence[int]) -> list[list[Part]]:
    rest = iter(spine)
    return [[next(rest) for _ in range(count)] for count in counts]


def _columns(devices: Sequence[torch.device]) -> list[int]:
    """Return the column of each partition: neighbours on one device are one column."""
    columns = [0]
    for before, device in pairwise(devices):
        columns.append(columns[-1] + (device != before))
    return columns


def _labels(layout: Layout, columns: Sequence[int]) -> list[str]:
    labels = []
    for column in range(columns[-1] + 1):
        own = [(j, layout.partitions[j]) for j, other in enumerate(columns) if other == column]
        (first, begin), (last, end) = own[0], own[-1]
        numbers = f"partition {first}" if first == last else f"partitions {first} to {last}"
        names = f"'{begin.parts[0].name}'..'{end.parts[-1].name}'"
        labels.append(f"{numbers} (modules {names}) on {begin.device}")
    return labels


def _coarser(
    module: nn.Module, traced: Trace, doors: Mapping[str, int], names: Mapping[nn.Module, str]
) -> dict[str, int]:
    """Return fewer doors: where all doors within a module lead to one column, a door of the module replaces them."""
    # No functions that call themselves: each would be a cycle that holds the model until the collector runs.
    inside: dict[nn.Module, set[int]] = {}
    columns_of: dict[int, set[int]] = {}
    for call in reversed(traced.calls()):  # inner calls first
        name = names.get(call.module, "")
        within = [columns_of[id(inner)] for inner in call.inner]
        columns_of[id(call)] = {doors[name]} if name in doors else set().union(*within)
        inside.setdefault(call.module, set()).update(columns_of[id(call)])
    result: dict[str, int] = {}
    pending = [traced.root]
    while pending:
        call = pending.pop(0)
        name, columns = names.get(call.module, ""), inside[call.module]
        if call.module is not module and len(columns) == 1:
            result[name] = next(iter(columns))
        elif name not in doors:
            pending[:0] = call.inner
    return result


def _homes(
    module: nn.Module, traced: Trace, doors: Mapping[str, int], names: Mapping[nn.Module, str]
) -> dict[str, int]:
    """Return the column of each parameter and buffer outside of the doors: that in which it is first used."""
    column_at = _column_at(traced, doors, names)
    homes: dict[str, int] = {}
    for name, child in module.named_modules():
        if door_of(name, doors) is not None:
            continue
        for own, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is not None:
                homes[dotted(name, own)] = column_at(traced.used.get(tensor, 0))
    return homes


def _column_at(traced: Trace, doors: Mapping[str, int], names: Mapping[nn.Module, str]) -> Callable[[int], int]:
    """Return a function from a place in the trace to the column of the door that was entered last."""
    starts = sorted(
        [(call.start, doors[names[call.module]]) for call in traced.calls() if names.get(call.module, "") in doors]
    )
    return lambda place: next((column for start, column in reversed(starts) if start <= place), 0)


def _verify_kept(traced: Trace, doors: Mapping[str, int], names: Mapping[nn.Module, str]) -> None:
    """Raise if a later partition uses a tensor that a module has put on itself: it may be another micro-batch's."""
    column_at = _column_at(traced, doors, names)
    for module, attribute, first, last in traced.kept:
        name, user = names[module], column_at(last)
        if user > column_at(first):
            where = f"'{name}'" if name else "the model"
            raise ValueError(
                f"{where} keeps the tensor '{attribute}' on itself, and partition {user} uses it, where it may be "
                "that of another micro-batch; return it, or give a balance that keeps it and its user together"
            )


def _verify_drawn(traced: Trace, doors: Mapping[str, int], names: Mapping[nn.Module, str]) -> None:
    """Raise if partitions share a generator of the model's own: their micro-batches would draw in no certain order."""
    column_at = _column_at(traced, doors, names)
    first: dict[torch.Generator, int] = {}
    for generator, place in traced.drawn:
        column, before = column_at(place), first.setdefault(generator, column_at(place))
        if column != before:
            raise ValueError(
                f"partitions {before} and {column} draw from one torch.Generator of the model, in no certain order, as "
                "they work at the same time; draw from PyTorch's own generator, for which each micro-batch has a seed, "
                "give each module a generator, or a balance that keeps those that share it in one partition"
            )


def _recomputed(names: Collection[str], doors: Mapping[str, int], checkpoint: bool | Collection[str]) -> set[str]:
    if checkpoint == "except_last":
        raise ValueError(
            "checkpoint='except_last' is for GPipe; a pipelined model recomputes modules, in all micro-batches: give "
            "'always', 'never', or the names of modules to recompute"
        )
    if isinstance(checkpoint, bool) or checkpoint in ("always", "never", None):
        return {*doors} if checkpoint in (True, "always") else set()
    if isinstance(checkpoint, str):
        checkpoint = [checkpoint]
    unknown = [name for name in checkpoint if name not in names]
    if unknown:
        raise ValueError(
            f"checkpoint names {unknown}, but takes 'always', 'never', or names of modules, such as the parts of the "
            f"spine: {[*doors]}"
        )
    apart = [name for name in checkpoint if door_of(name, doors) is None]
    across = [name for name in apart if len({doors[one] for one in doors if one.startswith(f"{name}.")}) != 1]
    if across:
        raise ValueError(
            f"checkpoint names {across}, which lie in several partitions or in none; name modules within one "
            f"partition: {[*doors]}"
        )
    return {*checkpoint}


def _tied(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several."""
    places: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    return [tuple(names) for names in places.values() if len(names) > 1]
