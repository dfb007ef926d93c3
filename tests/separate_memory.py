"""Devices of the CPU that copy, as if each had a memory of its own: the way of accelerators, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.devices.stream import Streams
from torchgpipe.front.pipelined import runs_of

__all__ = ["SeparateMemory", "separate_memory"]


class SeparateMemory(Streams):
    """Streams of devices that have a memory each."""

    def moves(self, source: torch.device, target: torch.device) -> bool:
        return source != target


@contextmanager
def separate_memory(*models: nn.Module, streams: Streams | None = None, recorder: Any = None) -> Iterator[None]:
    """Let pipelines, and those in them, copy between ``'cpu:0'``, ``'cpu:1'``, ... for a ``with`` block.

    Args:
        *models: the pipelines
        streams: their streams (default: streams that copy, and do nothing else)
        recorder: hears of them (default: who hears of them anyway)
    """
    streams = SeparateMemory() if streams is None else streams
    with ExitStack() as stack:
        for model in models:
            runs = runs_of(model)
            if runs is not None:
                stack.callback(setattr, runs, "streams", runs.streams)
                stack.callback(setattr, runs, "recorder", runs.recorder)
                runs.streams, runs.recorder = streams, runs.recorder if recorder is None else recorder
            for pipeline in (module for module in model.modules() if isinstance(module, GPipe)):
                mechanisms = pipeline._mechanisms
                stack.callback(setattr, pipeline, "_mechanisms", mechanisms)
                mine = mechanisms.recorder if recorder is None else recorder
                pipeline._mechanisms = replace(mechanisms, streams=streams, recorder=mine)
        yield
