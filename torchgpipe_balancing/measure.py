"""Measure the layers of a model one by one, each on its own.

The first walk along the layers counts what is kept for backward, and warms up. Further walks take times, until the
timeout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from torchgpipe_balancing.profiles import LayerProfile, Profile
from torchgpipe_balancing.sizes import SizeCounter, Sizes
from torchgpipe_balancing.times import Timer, Times
from torchgpipe_balancing.walk import layers_of, shapes_of, tensors_in, walk

__all__ = ["Device", "profile", "profile_sizes"]

Device: TypeAlias = torch.device | str | int | None


def profile(module: nn.Sequential, sample: Any, *, device: Device = None, timeout: float = 1.0) -> Profile:
    """Measures the time and the memory that each layer takes in training. ::

        profile = torchgpipe_balancing.profile(model, sample)
        print(profile)
        model = GPipe(model, profile.balance(4), chunks=8)

    Layers run in training mode, each as a copy, one at a time on the device: a model larger than the device can
    be profiled, and neither the module (parameters, gradients, buffers, mode, devices) nor PyTorch's random
    streams are touched. Layers may share parameters or work in place; they may take and return nested
    containers, integers, or tensors without gradient, and stash and pop skips. What the caller set, such as
    autocast, holds.

    Times are medians over rounds. On an accelerator they are taken by events on the device; what a copy does
    for the first time is left out. Activations are the bytes of all tensors that autograd saved for backward,
    each storage once, without parameters and buffers. A tensor that several layers save is counted for the
    first: the sum over layers is what the whole model keeps. A skip is part of the output of the layer that
    stashes it, and its gradient part of backward. If backward of the layer that pops it needs it, it counts as
    activation there too: on its way to another partition it is copied, and each end keeps its own.

    A tuple of several values is the arguments of the first layer if that takes as many, as in ``model(x, y)``, and one
    argument if not. From layer to layer a tuple is one argument, as in GPipe; in a
    :class:`~torchgpipe.pipe.PipeSequential` it is several, as in Pipe.

    Args:
        module: the model, not yet wrapped
        sample: an input: a tensor, or a nested container of tensors; of the size of a micro-batch, so that
            times are those of a micro-batch

    Keyword Args:
        device: where layers are profiled (default: the accelerator that the module or the sample is on, else
            the machine's accelerator, else the CPU)
        timeout: seconds after which no further round is started; at least one is made

    Returns:
        A profile, which prints as a table and proposes a balance.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``.
        ValueError: `timeout` is negative.
        Exception: what a layer raised, with a note that names the layer, its input, and the device.
    """
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 seconds or more, not {timeout}")
    place = _place(device, module, sample)

    with _undisturbed(place):
        sizes = walk(module, sample, place, SizeCounter())
        rounds: list[list[Times]] = []
        end = time.perf_counter() + timeout
        while not rounds or time.perf_counter() < end:
            rounds.append(walk(module, sample, place, Timer(place)))

    return Profile(
        layers=tuple(
            LayerProfile(name, type(layer).__name__, _median(times), size)
            for (name, layer), size, *times in zip(layers_of(module).items(), sizes, *rounds, strict=True)
        ),
        sample=shapes_of(sample),
        device=str(place),
        rounds=len(rounds),
    )


def profile_sizes(module: nn.Sequential, sample: Any, *, device: Device = None) -> list[Sizes]:
    """Counts what :func:`profile` counts, and takes no times.

    Args and errors are those of :func:`profile`.

    Returns:
        The sizes of each layer, in bytes.
    """
    place = _place(device, module, sample)
    with _undisturbed(place):
        return walk(module, sample, place, SizeCounter())


def _median(rounds: Iterable[Times]) -> Times:
    return Times(*(statistics.median(seconds) for seconds in zip(*map(astuple, rounds), strict=True)))


def _place(device: Device, module: nn.Module, sample: Any) -> torch.device:
    """The device to profile on, with its index."""
    if device is None:
        used = (tensor.device for tensor in chain(module.parameters(), module.buffers(), tensors_in(sample)))
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = next((place for place in used if place.type not in ("cpu", "meta")), accelerator or "cpu")
    return torch.empty(0, device=device).device


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keep the caller's random streams, gradient mode and current device."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # turns gradients on, too
        stack.callback(torch.clear_autocast_cache)
        if device.type == "cpu":
            stack.enter_context(torch.random.fork_rng([]))
        else:
            stack.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
            # Events and layers work on the current device.
            stack.enter_context(torch.accelerator.device_index(device.index))
        yield
