"""Devices of the CPU that copy, as if each had a memory of its own: the way of accelerators, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.devices.stream import Streams
from torchgpipe.front.pipelined import runs_of

__all__ = ["separate_memory"]


class _SeparateMemory(Streams):
    def moves(self, source: torch.device, target: torch.device) -> bool:
        return source != target


@contextmanager
def separate_memory(model: nn.Module) -> Iterator[None]:
    """Let a pipeline, and those in it, copy between ``'cpu:0'``, ``'cpu:1'``, ... for a ``with`` block."""
    with ExitStack() as stack:
        runs = runs_of(model)
        if runs is not None:
            stack.callback(setattr, runs, "streams", runs.streams)
            runs.streams = _SeparateMemory()
        for pipeline in (module for module in model.modules() if isinstance(module, GPipe)):
            stack.callback(setattr, pipeline, "_mechanisms", pipeline._mechanisms)
            pipeline._mechanisms = replace(pipeline._mechanisms, streams=_SeparateMemory())
        yield
