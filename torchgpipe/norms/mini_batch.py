"""Mark the extent of a mini-batch, for the deferred batch norms that run in it.

Accumulators belong to a call of the pipeline, not to the layers. So calls in several threads do not mix, and a call
that fails leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchgpipe.devices.torch_internals import BatchNormBase
from torchgpipe.norms.accumulator import Accumulator, accumulators
from torchgpipe.norms.moments import merge

__all__ = ["mini_batch"]


@contextmanager
def mini_batch(m: int) -> Iterator[None]:
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

    Raises:
        ValueError: ``m`` is not positive.
    """
    if m < 1:
        raise ValueError(f"the number of micro-batches in a mini-batch must be 1 or more, not {m}")
    outer = accumulators.get()
    mine: dict[BatchNormBase, Accumulator] = {}
    token = accumulators.set(mine)
    try:
        yield
        with torch.no_grad():
            for norm, accumulator in mine.items():
                runs, rest = divmod(len(accumulator.parts), m)
                # With different numbers of runs in the micro-batches, it is unknown which runs belong together.
                stride = 1 if rest else runs
                accumulator.parts = [merge(accumulator.parts[run::stride]) for run in range(stride)]
                if outer is None:
                    for moments in accumulator.parts:
                        accumulator.update(moments)
                elif norm in outer:
                    outer[norm].parts += accumulator.parts
                else:
                    outer[norm] = accumulator
    finally:
        accumulators.reset(token)
        mine.clear()  # The graph keeps the context for recomputations, and would keep the moments with it.
