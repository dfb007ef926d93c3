"""Arranging a module: from a sample to its spine, its partitions, and the settings to run it with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.frames.inputs import Splitter
from torchgpipe.frames.layout import Layout, PartitionLayout, SpinePart
from torchgpipe.frames.mini_batch import Arguments
from torchgpipe.frames.outputs import Kinds, kinds_of
from torchgpipe.frames.settings import Settings
from torchgpipe.frames.spine import Part, Trace, spine_of, trace
from torchgpipe.frames.values import mapped

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
    **settings: Any,
) -> Settings:
    """Return the settings of a module, given a device for each partition, or for each one at most if not ``fixed``.

    Raises:
        ValueError: the spine is shorter than the partitions, or the balance or ``checkpoint`` does not fit it.
    """
    splitter = Splitter(module.forward, sample, no_chunk)
    began = balance if isinstance(balance, Mapping) else {}
    with _as_before(module):
        where = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        if where.type == "meta" and balance == "time":
            balance = "parameters"  # Nothing computes there.
        sample = Arguments(*mapped(tuple(sample), lambda tensor: tensor.detach().to(where)))
        try:
            traces = [_traced(module, sample) for _ in range(_ROUNDS if balance == "time" else 1)]
        except BaseException as error:
            if where.type == "meta":
                error.add_note(
                    "the sample runs on the meta device, which has no values: leave arguments out of the sample whose "
                    "values the model looks at, such as attention_mask; later batches may have them"
                )
            raise
        kinds = _kinds(module, sample, splitter, traces[0])
        takes_items, shifts = _loss_of(module, sample)
    spine = spine_of(module, traces[0], len(devices), list(began))
    if not fixed:
        devices = devices[: max(1, len(spine))]
    n = len(devices)
    for part in spine:
        part.seconds = median([one.seconds(part.modules.values()) for one in traces])
    if len(spine) < n:
        raise ValueError(_too_short(spine, n))
    counts = _counts(spine, n, balance)
    parts = _divided(spine, counts)
    columns = _columns(devices)
    doors = {name: columns[j] for j, own in enumerate(parts) for part in own for name in part.modules}
    names = {child: name for name, child in module.named_modules()}
    homes = _homes(module, traces[0], doors, names)
    _verify_kept(traces[0], doors, homes, names)
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
        _tied(module, doors, homes),
    )
    return Settings(
        devices=[device for j, device in enumerate(devices) if j == 0 or columns[j] != columns[j - 1]],
        labels=_labels(layout, columns),
        doors=doors,
        homes=homes,
        recomputed=recomputed,
        splitter=splitter,
        kinds=kinds,
        shifts=shifts,
        takes_items=takes_items,
        layout=layout,
        **settings,
    )


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Put buffers and random states back after a ``with`` block, which builds no graph."""
    buffers = [(child, name, buffer) for child in module.modules() for name, buffer in child._buffers.items()]
    values = [None if buffer is None else buffer.detach().clone() for _, _, buffer in buffers]
    devices = sorted({one.device.index for one in module.parameters() if one.device.type not in ("cpu", "meta")})
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            yield
        finally:
            for (child, name, buffer), value in zip(buffers, values):
                child._buffers[name] = buffer
                if buffer is not None and value is not None and not buffer.is_meta:
                    buffer.copy_(value)


def _traced(module: nn.Module, sample: Arguments) -> Trace:
    args, kwargs = mapped(tuple(sample), torch.Tensor.clone, caches=True)
    return trace(module, lambda: module.forward(*args, **kwargs))


def _kinds(module: nn.Module, sample: Arguments, splitter: Splitter, traced: Trace) -> Kinds:
    """Return how the outputs depend on the rows; nothing is known from a sample of one row."""
    if splitter.rows < 2:
        return {}
    fewer, _ = splitter.split(sample, [splitter.rows - 1, 1])
    args, kwargs = mapped(tuple(fewer), torch.Tensor.clone, caches=True)
    try:
        smaller = module.forward(*args, **kwargs)
    except Exception:
        return {}  # The model wants more rows, as a batch norm does in training; sizes will tell.
    return kinds_of(traced.output, splitter.rows, smaller, splitter.rows - 1)


def _too_short(spine: list[Part], n: int) -> str:
    if not spine:
        return "there is nothing to split: the model calls no module with parameters"
    names = ", ".join([f"'{part.name}'" for part in spine])
    largest = max(spine, key=lambda part: part.parameters)
    return (
        f"the spine of the model has {len(spine)} parts that can be kept apart ({names}), fewer than the {n} "
        f"partitions; the largest is '{largest.name}', which cannot be opened; ask for {len(spine)} partitions"
    )


def _counts(spine: list[Part], n: int, balance: str | Sequence[int] | Mapping[str, int]) -> list[int]:
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
        return _counts_of_names(spine, n, balance)
    counts = list(balance)
    if len(counts) != n or sum(counts) != len(spine) or min(counts) < 1:
        raise ValueError(
            f"balance must have {n} positive counts that add up to {len(spine)}, the parts of the spine, but got "
            f"{counts}; the parts are {[part.name for part in spine]}"
        )
    return counts


def _counts_of_names(spine: list[Part], n: int, balance: Mapping[str, int]) -> list[int]:
    starts = {0: 0}
    for name, j in balance.items():
        found = [k for k, part in enumerate(spine) if any(f"{own}.".startswith(f"{name}.") for own in part.modules)]
        if not found:
            raise ValueError(
                f"balance names '{name}', which is no part of the spine; the parts are {[part.name for part in spine]}"
            )
        starts[j] = found[0]
    begins = [starts.get(j, -1) for j in range(n)]
    if len(starts) != n or any(a >= b for a, b in pairwise(begins)):
        raise ValueError(
            f"balance must name where each of the partitions 1 to {n - 1} begins, in the order of the spine, but got "
            f"{dict(balance)}; the parts are {[part.name for part in spine]}"
        )
    return [b - a for a, b in zip(begins, [*begins[1:], len(spine)])]


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
    """Return fewer doors: one for a module all of whose doors are in one column, and nothing else is called in it."""
    inside: dict[nn.Module, set[int]] = {}

    def visit(call: Any) -> set[int]:
        name = names.get(call.module, "")
        columns = {doors[name]} if name in doors else set().union(*[visit(inner) for inner in call.inner])
        inside.setdefault(call.module, set()).update(columns)
        return columns

    visit(traced.root)
    result: dict[str, int] = {}

    def collect(call: Any) -> None:
        name, columns = names.get(call.module, ""), inside[call.module]
        if call.module is not module and len(columns) == 1:
            result[name] = next(iter(columns))
        elif name not in doors:
            for inner in call.inner:
                collect(inner)

    collect(traced.root)
    return result


def _homes(
    module: nn.Module, traced: Trace, doors: Mapping[str, int], names: Mapping[nn.Module, str]
) -> dict[str, int]:
    """Return the column of each parameter and buffer outside of the doors: that in which it is first used."""
    starts: list[tuple[int, int]] = []
    buffers: dict[str, int] = {}

    def visit(call: Any) -> None:
        name = names.get(call.module, "")
        column = max(starts)[1] if starts else 0
        if name in doors:
            starts.append((call.start, doors[name]))
            return
        if name:
            buffers.setdefault(name, column)
        for inner in call.inner:
            visit(inner)

    visit(traced.root)
    homes: dict[str, int] = {}
    for name, child in module.named_modules():
        if _covered(name, doors):
            continue
        for own, parameter in child._parameters.items():
            if parameter is not None:
                use = traced.used.get(parameter)
                before = [column for start, column in starts if use is not None and start <= use]
                homes[f"{name}.{own}" if name else own] = before[-1] if before else 0
        for own in child._buffers:
            homes[f"{name}.{own}" if name else own] = buffers.get(name, 0)
    return homes


def _covered(name: str, doors: Mapping[str, int]) -> bool:
    while name:
        if name in doors:
            return True
        name = name.rpartition(".")[0]
    return False


def _verify_kept(
    traced: Trace, doors: Mapping[str, int], homes: Mapping[str, int], names: Mapping[nn.Module, str]
) -> None:
    """Raise if a later partition uses a tensor that a module has put on itself: it may be another micro-batch's."""
    starts = sorted(
        [(call.start, doors[names[call.module]]) for call in traced.calls() if names.get(call.module, "") in doors]
    )
    for module, attribute, last in traced.kept:
        name = names[module]
        own = [column for door, column in doors.items() if f"{name}.".startswith(f"{door}.")]
        own += [column for path, column in homes.items() if path == (f"{name}.{attribute}" if name else attribute)]
        user = [column for start, column in starts if start <= last]
        if own and user and user[-1] > own[0]:
            where = f"'{name}'" if name else "the model"
            raise ValueError(
                f"{where} keeps the tensor '{attribute}' on itself, and partition {user[-1]} uses it, where it may be "
                "that of another micro-batch; return it, or give a balance that keeps it and its user together"
            )


def _recomputed(names: Collection[str], doors: Mapping[str, int], checkpoint: bool | Collection[str]) -> set[str]:
    if isinstance(checkpoint, bool):
        return {*doors} if checkpoint else set()
    if isinstance(checkpoint, str):
        checkpoint = [checkpoint]
    unknown = [name for name in checkpoint if name not in names]
    if unknown:
        raise ValueError(f"checkpoint names {unknown}, but the parts of the spine are {[*doors]}")
    apart = [name for name in checkpoint if not _covered(name, doors)]
    across = [name for name in apart if len({doors[one] for one in doors if one.startswith(f"{name}.")}) != 1]
    if across:
        raise ValueError(
            f"checkpoint names {across}, which lie in several partitions or in none; name modules within one "
            f"partition: {[*doors]}"
        )
    return {*checkpoint}


def _tied(module: nn.Module, doors: Mapping[str, int], homes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the names of parameters that are in several places."""
    places: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    return [tuple(names) for names in places.values() if len(names) > 1]


def _loss_of(module: nn.Module, sample: Arguments) -> tuple[bool, bool]:
    """Return two properties of the model's own loss, which a look at the model would not tell for sure.

    Returns:
        whether the loss is divided by ``num_items_in_batch``, which many models accept and ignore; and whether it
        leaves out the first label of each row, because it compares outputs with the next labels
    """
    labels = sample.kwargs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_meta:
        return False, _names_a_causal_loss(module)
    plain = _loss(module, sample)
    if plain is None:
        return False, False
    one, two = (_loss(module, sample, num_items_in_batch=count) for count in (1, 2))
    divides = one is not None and two is not None and abs(one) > 1.5 * abs(two)
    named, left_out = _names_a_causal_loss(module), labels == -100
    if labels.dim() != 2 or not (named or left_out.any()):
        return divides, False  # Another number than -100 may be left out, and -100 be an error.
    if left_out[:, 0].all():
        return divides, named
    without = labels.clone()
    without[:, 0] = -100
    return divides, _loss(module, sample, labels=without) == plain


def _loss(module: nn.Module, sample: Arguments, **others: Any) -> float | None:
    args, kwargs = mapped(tuple(sample), torch.Tensor.clone, caches=True)
    torch.manual_seed(0)
    try:
        output = module.forward(*args, **{**kwargs, **others})
    except (TypeError, RuntimeError):
        return None  # It does not take this argument.
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return float(loss) if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _names_a_causal_loss(module: nn.Module) -> bool:
    loss: Callable[..., Any] | None = getattr(module, "loss_function", None)
    config = getattr(module, "config", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and not getattr(config, "is_encoder_decoder", False)
