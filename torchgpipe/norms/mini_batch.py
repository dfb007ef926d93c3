"""Mark the extent of a mini-batch, for the deferred batch norms that run in it.

Accumulators belong to a call of the pipeline, not to the layers. So calls in several threads do not mix, and a call
that fails leaves nothing behind. Under DistributedDataParallel the mini-batch is that of all processes together: they
exchange their moments at its end, all layers at once, in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchgpipe.devices.torch_internals import BatchNormBase
from torchgpipe.model.data_parallel import active_process_group, refuse_join
from torchgpipe.norms.accumulator import Accumulator, accumulators, is_tracking
from torchgpipe.norms.deferred import DeferredBatchNorm
from torchgpipe.norms.moments import merge
from torchgpipe.norms.synchronize import synchronize

__all__ = ["mini_batch"]


@contextmanager
def mini_batch(m: int, model: nn.Module | None = None, group: Any = None) -> Iterator[None]:
    """Make a ``with`` block one mini-batch for the deferred batch norms that run in it.

    At the end of the block they update their running statistics. After an exception they discard what they have seen.
    :class:`~torchgpipe.GPipe` opens such a block in each forward. In a loop of your own, open one around each
    mini-batch::

        with mini_batch(4):
            for x, y in zip(input.chunk(4), target.chunk(4)):
                loss_fn(model(x), y).backward()

    Blocks can be nested: an inner block is part of one micro-batch of the outer block.

    Args:
        m: the number of micro-batches; a layer that runs k times in each of them makes k updates, as it would
            on the whole mini-batch
        model: the model that :class:`~torch.nn.parallel.DistributedDataParallel` wraps, if any; the mini-batch of its
            layers is that of all processes
        group: the processes that hold the same ``model``, where no DistributedDataParallel is active to tell

    Raises:
        ValueError: ``m`` is not positive.
        RuntimeError: the processes may have different numbers of mini-batches.
    """
    if m < 1:
        raise ValueError(f"the number of micro-batches in a mini-batch must be 1 or more, not {m}")
    outer = accumulators.get()
    mine = _synchronized(model, group)
    token = accumulators.set(mine)
    try:
        yield
        with torch.no_grad():
            for norm, accumulator in mine.items():
                runs, rest = divmod(len(accumulator.parts), m)
                # With different numbers of runs in the micro-batches, it is unknown which runs belong together.
                stride = 1 if rest else runs
                accumulator.parts = [merge(accumulator.parts[run::stride]) for run in range(stride)]
                if outer is not None and norm in outer:
                    outer[norm].parts += accumulator.parts
                elif outer is not None:
                    outer[norm] = accumulator
            if outer is None:
                _update(mine.values())
    finally:
        accumulators.reset(token)
        mine.clear()  # The graph keeps the context for recomputations, and would keep the moments with it.


def _synchronized(model: nn.Module | None, group: Any) -> dict[BatchNormBase, Accumulator]:
    """Return empty accumulators for all layers that exchange their moments with other processes.

    Their order is that of the model, which is the same in every process. The order of their runs is not, and a layer
    may run in some processes only.
    """
    if model is not None and group is None:
        group = active_process_group()
    if model is None or group is None:
        return {}
    norms = [norm for norm in model.modules() if isinstance(norm, DeferredBatchNorm) and is_tracking(norm)]
    if norms:
        refuse_join()
    return {norm: Accumulator(norm, group) for norm in norms}


def _update(layers: Iterable[Accumulator]) -> None:
    groups: dict[Any, list[Accumulator]] = {}
    for layer in layers:
        groups.setdefault(layer.group, []).append(layer)
    for group, members in groups.items():
        if group is not None:
            synchronize(group, members)
        for layer in members:
            for moments in layer.parts:
                layer.update(moments)
