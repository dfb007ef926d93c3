"""Leave the caller's generator of the CPU where it was, although layers recompute themselves in several threads.

A layer with a checkpoint of its own, by `torch.utils.checkpoint`, sets the one generator of the CPU to its state in
forward, and afterwards back to what it found. Where two threads do so at once, one finds the state that the other has
set, and leaves it there:

    device 0    finds C, sets F ──────► sets C
    device 1                 finds F, sets F ──────► sets F       and a loop draws what it has drawn before

If no layer draws from that generator, F is the state at the beginning of forward. Drawing never leads to an earlier
state, so a generator in that state has been left there, and what hooks draw at backward stays drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from torchgpipe.devices.generators import go_on_from, state_of
from torchgpipe.devices.torch_internals import at_end_of_pass, current_pass

__all__ = ["CallersGenerator"]


class CallersGenerator:
    """The generator of the CPU during the forward and the backward of a mini-batch.

    Attributes:
        before: its state before forward
    """

    def __init__(self) -> None:
        self.before = state_of(torch.default_generator)
        self._watched: int | None = None  # the last backward pass that is watched

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the generator back after a backward in the ``with`` block, if it was left where forward began."""
        state = state_of(torch.default_generator)
        try:
            yield
        finally:
            self._put_back(state)

    def watch(self, outputs: Iterable[Tensor | None]) -> None:
        """Do the same for backward passes that the caller starts.

        Args:
            outputs: where such a pass enters the graph of the mini-batch
        """
        for output in outputs:
            if output is not None and output.grad_fn is not None:
                output.grad_fn.register_prehook(self._begin_pass)

    def _begin_pass(self, _: object) -> None:
        this_pass = current_pass()
        if self._watched != this_pass:
            self._watched = this_pass
            at_end_of_pass(partial(self._put_back, state_of(torch.default_generator)))

    def _put_back(self, state: Tensor) -> None:
        if torch.equal(state_of(torch.default_generator), self.before):
            go_on_from(torch.default_generator, state)
