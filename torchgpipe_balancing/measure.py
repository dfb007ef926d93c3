"""Measure the layers of a model one by one, each on its own.

The first walk along the layers counts what is kept for backward, and warms up. Further walks take times, until the
timeout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.devices.device import default_device
from torchgpipe.devices.memory import bytes_of, storages_of
from torchgpipe.devices.torch_internals import pytree
from torchgpipe.devices.typing import Device
from torchgpipe.proof.leaves import Leaves
from torchgpipe_balancing.held import SavedTensors
from torchgpipe_balancing.profiles import LayerProfile, Profile, Sizes, Times
from torchgpipe_balancing.walk import Input, Output, gradients_of, layers_of, run, shapes_of, tensors_in, walk

__all__ = ["profile", "undisturbed"]

T = TypeVar("T")


def profile(module: nn.Sequential, sample: Any, *, device: Device | None = None, timeout: float = 1.0) -> Profile:
    """Measure the time and the memory that each layer takes in training. ::

        profile = torchgpipe_balancing.profile(model, sample)
        print(profile)
        model = GPipe(model, profile.balance(4), chunks=8)

    Layers run in training mode, each as a copy, one at a time on the device. So a model larger than the device can
    be profiled, and neither the module (parameters, gradients, buffers, mode, devices) nor PyTorch's random
    streams are touched. Layers may share parameters and work in place. They may take and return nested
    containers, integers, and tensors without gradient, and may stash and pop skips. What the caller set, such as
    autocast, holds.

    Times are medians over rounds. On an accelerator, events on the device take the times. The first run of a copy is
    not timed. Activations are the bytes of all tensors that autograd saved for backward, each storage once, without
    parameters, buffers and sparse tensors. A tensor that several layers save counts for the first of them, so the sum
    over all layers is what the whole model keeps. A skip is part of the output of the layer that stashes it, and the
    skip's gradient is part of that layer's backward. If backward of the layer that pops the skip needs it, the skip
    also counts as an activation there: a skip is copied to another partition, and each partition keeps its own.

    A sample that is a tuple of several values is the arguments of the first layer if the layer takes as many, as in
    ``model(x, y)``, and otherwise one argument. From layer to layer a tuple is one argument, as in GPipe. In a
    :class:`~torchgpipe.pipe.PipeSequential` a tuple is several arguments, as in Pipe.

    Args:
        module: the model, not yet wrapped
        sample: an input of the size of a micro-batch: a tensor, or a nested container of tensors

    Keyword Args:
        device: where layers are profiled (default: the accelerator that the module or the sample is on, else
            the machine's accelerator, else the CPU)
        timeout: seconds after which no further round is started; there is at least one round

    Returns:
        The profile, which prints as a table and proposes a balance.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``.
        ValueError: `timeout` is negative.
        Exception: the error of a layer, with a note that names the layer, its input, and the device.
    """
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 seconds or more, not {timeout}")
    place = _place(device, module, sample)

    with undisturbed([place]) as outside:
        sizes = walk(module, sample, place, _SizeCounter(outside))
        rounds: list[list[Times]] = []
        end = time.perf_counter() + timeout
        while not rounds or time.perf_counter() < end:
            rounds.append(walk(module, sample, place, partial(_timed_runs, device=place)))

    return Profile(
        layers=tuple(
            LayerProfile(name, type(layer).__name__, _median(times), size)
            for (name, layer), size, *times in zip(layers_of(module).items(), sizes, *rounds, strict=True)
        ),
        sample=shapes_of(sample),
        device=str(place),
        rounds=len(rounds),
    )


class _SizeCounter:
    """Count what a layer keeps for backward, and what it owns.

    Two layers often keep the same storage: the one as its output, the next as its input. It counts for the first.

    Args:
        outside: sets aside what is at leaves outside of the layers
    """

    def __init__(self, outside: Leaves) -> None:
        self._outside = outside
        self._counted: set[int] = set()

    def __call__(self, layer: nn.Module, input: Input) -> tuple[Output, Sizes]:
        saved = SavedTensors()
        with saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
            output = run(layer, input)

        memories = saved.memories()  # A tensor that autograd has dropped before the layer returned is not kept.
        new = memories.keys() - storages_of(chain(layer.parameters(), layer.buffers())).keys() - self._counted
        # Without skips: they move to the host, and a later tensor can get their address.
        self._counted = (self._counted | new) & storages_of(tensors_in(output.value)).keys()
        sizes = Sizes(
            activations=sum(memories[key] for key in new),
            parameters=bytes_of(layer.parameters()),
            buffers=bytes_of(layer.buffers()),
            output=bytes_of(tensors_in(output)),
        )
        tensors, gradients = gradients_of(output)
        self._outside.note(tensors, [*layer.parameters()])
        torch.autograd.backward(tensors, gradients)
        return output, sizes


def _timed_runs(layer: nn.Module, input: Input, device: torch.device) -> tuple[Output, Times]:
    """Time the runs of a layer for one input."""
    trained = any(tensor.requires_grad for tensor in chain(layer.parameters(), tensors_in(input)))

    # Layers may work in place, so every run but the last gets an input of its own.
    def cloned() -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), input)

    with torch.no_grad():
        run(layer, cloned())  # The first run of a copy is slower.
        recompute = _timed(device, run, layer, cloned())[1] if trained else 0.0
    output, forward = _timed(device, run, layer, input)
    tensors, gradients = gradients_of(output)
    backward = _timed(device, torch.autograd.backward, tensors, gradients)[1] if tensors else 0.0
    return output, Times(forward, recompute, backward)


def _timed(device: torch.device, function: Callable[..., T], *args: Any) -> tuple[T, float]:
    """Call a function, and return its result and the seconds that the device took."""
    if device.type == "cpu":
        start = time.perf_counter()
        return function(*args), time.perf_counter() - start
    torch.accelerator.synchronize(device)
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    begin.record()
    result = function(*args)
    end.record()
    end.synchronize()
    return result, begin.elapsed_time(end) / 1000  # milliseconds


def _median(rounds: Iterable[Times]) -> Times:
    return Times(*(statistics.median(seconds) for seconds in zip(*map(astuple, rounds), strict=True)))


def _place(device: Device | None, module: nn.Module, sample: Any) -> torch.device:
    """Return the device to profile on, with its index."""
    if device is None:
        used = (tensor.device for tensor in chain(module.parameters(), module.buffers(), tensors_in(sample)))
        device = next((place for place in used if place.type not in ("cpu", "meta")), default_device())
    return torch.empty(0, device=device).device


@contextmanager
def undisturbed(devices: Sequence[torch.device]) -> Iterator[Leaves]:
    """Keep the caller's random streams, gradient mode and current device, which becomes the first accelerator.

    Provide what keeps the gradients and hooks of leaves outside of a model.
    """
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # also turns gradients on
        stack.callback(torch.clear_autocast_cache)
        if accelerators:
            indices = [device.index for device in accelerators]
            stack.enter_context(torch.random.fork_rng(indices, device_type=accelerators[0].type))
            # Events, and layers that create tensors, use the current device.
            stack.enter_context(torch.accelerator.device_index(indices[0]))
        else:
            stack.enter_context(torch.random.fork_rng([]))
        yield stack.enter_context(Leaves())
