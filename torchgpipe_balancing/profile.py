"""Measures the layers of a model one by one, each on its own.

A model that needs a pipeline may be too large for any one device. So no more than one layer is there at a time:
a copy is made, measured and dropped, and the next one gets its output. Working on copies is also what leaves the
caller's module as it was: its parameters, gradients, buffers, mode and devices are never touched.

        sample --> copy of layer 0 --> cut --> copy of layer 1 --> cut --> ...

A cut ends the graph, so that each layer's backward is its own. A skip waits on the host between the layer that
stashes it and the one that pops it, and is cut as well. The first walk along the layers counts what is kept for
backward, and warms up; further ones take times, until the timeout.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from torchgpipe.skip.layout import skips_of
from torchgpipe.skip.namespace import SkipKey
from torchgpipe.skip.tracker import SkipTracker
from torchgpipe_balancing.report import LayerProfile, Report, Sizes, Times

__all__ = ["Device", "layers", "profile", "profile_sizes"]

Device: TypeAlias = torch.device | str | int | None
Progress: TypeAlias = Callable[[], object]
T = TypeVar("T")


def profile(module: nn.Sequential, sample: Any, *, device: Device = None, timeout: float = 1.0) -> Report:
    """Measures the time and the memory that each layer takes in training. ::

        report = profile(model, sample)
        print(report)
        model = GPipe(model, report.balance(4), chunks=8)

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
    argument if not; a list only if the layer could not take one. From layer to layer a tuple is one argument, as in
    GPipe, or several where the next layer could not take one, and always in a
    :class:`~torchgpipe.pipe.PipeSequential`.

    Args:
        module: the model, not yet wrapped
        sample: an input: a tensor, or a nested container of tensors; of the size of a micro-batch, so that
            times are those of a micro-batch

    Keyword Args:
        device: where layers are profiled (default: the accelerator that the module or the sample is on, else
            the machine's accelerator, else the CPU)
        timeout: seconds after which no further round is started; at least one is made

    Returns:
        A report, which prints as a table and proposes a balance.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``.
        ValueError: `timeout` is negative.
        Exception: what a layer raised, with a note that names the layer, its input, and the device. What a layer
            took before it ran out of memory is free again.
    """
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 seconds or more, not {timeout}")
    place = _place(device, module, sample)

    with _undisturbed(place), _progress(2 * len(layers(module))) as progress:
        sizes = _walk(module, sample, place, _Counter(), progress)
        rounds: list[list[Times]] = []
        end = time.perf_counter() + timeout
        while not rounds or time.perf_counter() < end:
            rounds.append(_walk(module, sample, place, _Timer(place), progress))

    return Report(
        layers=tuple(
            LayerProfile(name, type(layer).__name__, _median(times), size)
            for (name, layer), size, *times in zip(layers(module).items(), sizes, *rounds, strict=True)
        ),
        sample=_shapes(sample),
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
    with _undisturbed(place), _progress(len(layers(module))) as progress:
        return _walk(module, sample, place, _Counter(), progress)


def layers(module: nn.Sequential) -> dict[str, nn.Module]:
    """The layers by name; one that occurs twice is there twice.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, not {type(module).__name__}")
    return dict(zip(module._modules, module, strict=True))


class _Passed(NamedTuple):
    """What a layer is given: its input and the skips that it pops. Or what it gives: its output and its stashes.

    Attributes:
        spread: whether the value is a tuple of several arguments
    """

    value: Any
    skips: dict[SkipKey, Tensor | None]
    spread: bool = False


# A measure runs one layer, and returns what it gave and what was found out.
Measure: TypeAlias = Callable[[nn.Module, _Passed], tuple[_Passed, T]]


def _walk(
    module: nn.Sequential,
    sample: Any,
    device: torch.device,
    measure: Measure[T],
    progress: Progress,
) -> list[T]:
    """Takes the sample through copies of all layers, and measures each."""

    def visit(layer: nn.Module, value: Any) -> tuple[Any, T]:
        popped = {key: skips.pop(key) for key in skips_of(layer.modules(), "poppable_names") if key in skips}
        passed = _Passed(value, _cut(_placed(popped, device)), _spreads(module, layer, value, first=not found))
        output, measured = measure(_copied(layer, device), passed)
        skips.update(_placed(output.skips, "cpu"))
        return _cut(output.value), measured

    value = _cut(_placed(sample, device))
    skips: dict[SkipKey, Tensor | None] = {}  # on the host, so that they take no place from the layers between
    found: list[T] = []
    for name, layer in layers(module).items():
        try:
            value, measured = visit(layer, value)
        except Exception as error:
            error.add_note(
                f"while profiling layer {name!r} ({type(layer).__name__}) with input {_shapes(value)}, "
                f"from a sample of {_shapes(sample)}, on {device}"
            )
            raise
        found.append(measured)
        progress()
    return found


def _spreads(module: nn.Sequential, layer: nn.Module, value: Any, *, first: bool) -> bool:
    """Whether a value is several arguments of a layer of the module."""
    if isinstance(value, tuple) and _takes(module, None, None):  # A plain Sequential takes one, and hands on one.
        return True
    if not (isinstance(value, tuple) or (first and isinstance(value, list))) or len(value) < 2:
        return False
    preferred = first and isinstance(value, tuple)
    return _takes(layer, *value) and (preferred or not _takes(layer, value))


def _takes(layer: nn.Module, *arguments: Any) -> bool:
    """Whether a layer can be called with these arguments."""
    try:
        signature = inspect.signature(layer.forward)
        signature.bind(*arguments)
    except (TypeError, ValueError):  # The latter, if nothing is known of them.
        return False
    inner = getattr(layer, "module", None)
    hands_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    return _takes(inner, *arguments) if hands_on and isinstance(inner, nn.Module) else True


def _call(layer: nn.Module, passed: _Passed) -> _Passed:
    """Runs a layer: the one place where that happens."""
    # Autocast would keep what it has cast for layers that are gone, and for runs that built no graph.
    torch.clear_autocast_cache()
    tracker = SkipTracker(passed.skips.items())
    with tracker:
        output = layer(*passed.value) if passed.spread else layer(passed.value)
        return _Passed(output, tracker.skips)


class _Counter:
    """Counts what a layer keeps for backward, and what it has.

    A layer's input is often kept twice, by the layer that made it and by the one that takes it. It is the same
    storage, and counts for the first.
    """

    def __init__(self) -> None:
        self._counted: set[int] = set()

    def __call__(self, layer: nn.Module, passed: _Passed) -> tuple[_Passed, Sizes]:
        # What autograd lets go before the layer returns is not kept: it vanishes from here too.
        saved: WeakSet[_Saved] = WeakSet()

        def pack(tensor: Tensor) -> _Saved:
            packed = _Saved(tensor)
            saved.add(packed)
            return packed

        with saved_tensors_hooks(pack, lambda packed: packed.tensor):
            output = _call(layer, passed)

        kept = _storages([packed.tensor for packed in saved])
        owned = _storages(chain(layer.parameters(), layer.buffers()))
        new = kept.keys() - owned.keys() - self._counted
        # Skips go to the host, and their addresses to whoever comes next.
        self._counted = (self._counted | new) & _storages(_tensors(output.value)).keys()

        sizes = Sizes(
            activations=sum(kept[address] for address in new),
            parameters=_bytes(layer.parameters()),
            buffers=_bytes(layer.buffers()),
            output=_bytes(_tensors(output)),
        )
        torch.autograd.backward(*_gradients(output))
        return output, sizes


class _Saved:
    """A tensor that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        # The output of an operation, saved by it, must not hold the operation in turn.
        self.tensor = tensor.detach()


class _Timer:
    """Times what a layer does for one input."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, layer: nn.Module, passed: _Passed) -> tuple[_Passed, Times]:
        trained = any(tensor.requires_grad for tensor in chain(layer.parameters(), _tensors(passed)))

        # Layers may work in place: whoever is not the last to run gets an input of its own.
        with torch.no_grad():
            _call(layer, _cloned(passed))  # A copy's first run is no typical one.
            recompute = self._timed(_call, layer, _cloned(passed))[1] if trained else 0.0

        output, forward = self._timed(_call, layer, passed)
        tensors, gradients = _gradients(output)
        backward = self._timed(torch.autograd.backward, tensors, gradients)[1] if tensors else 0.0
        return output, Times(forward, recompute, backward)

    def _timed(self, function: Callable[..., T], *args: Any) -> tuple[T, float]:
        """Calls a function, and tells how many seconds the device took for it."""
        if self._device.type == "cpu":
            start = time.perf_counter()
            return function(*args), time.perf_counter() - start

        torch.accelerator.synchronize(self._device)
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        begin.record()
        result = function(*args)
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1000  # milliseconds


class _Cut(torch.autograd.Function):
    """A tensor with a graph of its own: it needs gradient, but what it gets goes nowhere.

    The tensor is neither a leaf, for a layer to work on it in place, nor a copy, for a layer's input to be known
    again as what the layer before has kept.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _cut(value: Any) -> Any:
    """Cuts all tensors off their graph; those that needed gradient still do."""
    phony = torch.empty(0, device="cpu", requires_grad=True)

    def cut(tensor: Tensor) -> Tensor:
        alone = tensor.detach()
        return _Cut.apply(phony, alone) if tensor.requires_grad else alone  # type: ignore[no-untyped-call]

    return tree_map_only(Tensor, cut, value)


def _copied(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copies a layer to the device, in training mode."""
    # Tensors that a layer has computed and keeps as attributes, as weight_norm does, cannot be deep-copied.
    computed = {
        id(value): value.detach().clone()
        for module in layer.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(layer, computed).to(device).train()


def _placed(value: Any, device: torch.device | str) -> Any:
    """Copies all tensors to the device, without their graph."""

    def placed(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, placed, value)


def _cloned(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _median(rounds: Iterable[Times]) -> Times:
    return Times(*(statistics.median(seconds) for seconds in zip(*map(astuple, rounds), strict=True)))


def _gradients(output: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of an output that backward starts from, and ones for each."""
    tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    return tensors, [torch.ones_like(tensor) for tensor in tensors]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


#: What tensors that are not dense are made of.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _dense(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.layout in _PARTS:
            yield from (getattr(tensor.detach(), part)() for part in _PARTS[tensor.layout])
        else:
            yield tensor


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and size in bytes of all memory behind the tensors."""
    storages = [tensor.untyped_storage() for tensor in _dense(tensors)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _dense(tensors))


def _shapes(value: Any) -> str:
    """Shapes and types of all tensors, for messages."""
    shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in _tensors(value)]
    return ", ".join(shapes) or "no tensor"


def _place(device: Device, module: nn.Module, sample: Any) -> torch.device:
    """The device to profile on, with its index."""
    if device is None:
        used = (tensor.device for tensor in chain(module.parameters(), module.buffers(), _tensors(sample)))
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = next((place for place in used if place.type not in ("cpu", "meta")), accelerator or "cpu")
    return torch.empty(0, device=device).device


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keeps the caller's random streams, and where memory runs out, gives back all that was taken."""
    module = torch.get_device_module(device)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # turns gradients on, too
        stack.callback(torch.clear_autocast_cache)
        if device.type == "cpu":
            stack.enter_context(torch.random.fork_rng([]))
        else:
            stack.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
            # Events and layers work on the current device; where there is but one, nothing switches it.
            if hasattr(module, "device"):
                stack.enter_context(module.device(device))
        try:
            yield
        except Exception as error:
            if _is_out_of_memory(error):
                # The error outlives the layer: the frames in its traceback still hold what the layer made.
                traceback.clear_frames(error.__traceback__)
                if device.type != "cpu":
                    module.empty_cache()
            raise


def _is_out_of_memory(error: Exception) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """Counts layers on a progress bar, where there is a terminal and tqdm, and where it takes a while."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
    else:
        with tqdm(desc="profiling", total=total, unit="layer", delay=1, leave=False, disable=None) as bar:
            yield bar.update
