"""The spine of a module: what it calls one after the other, so that neighbours can be put on different devices.

A run on a sample shows which modules call which. The spine begins with the module itself, and is opened where it is
coarse:

    GPT2LMHeadModel ──► transformer ──► wte │ wpe │ h.0 │ h.1 │ ... │ ln_f    opened, for elements of a ModuleList
                    └─► lm_head                                               not opened, for it has no parts

A part of the spine is one module, or several that cannot be kept apart, because one of them is called again after
another. The spine follows from the structure and the parameters alone, so every process and every copy finds the same.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.memory import bytes_of
from torchgpipe.devices.torch_internals import (
    is_optimized,
    own_call,
    plain_call,
    pop_function_mode,
    push_function_mode,
    replace_call,
    versions,
)
from torchgpipe.frames.operations import changes_shape, changes_values
from torchgpipe.model.untouched import attributes
from torchgpipe.model.values import each

__all__ = ["Part", "Trace", "spine_of", "trace"]


@dataclass
class _Call:
    """A call of a module.

    Attributes:
        module: the module
        start: its place in the order of all events
        end: the place of its return
        seconds: the time that it took
        inner: the calls that it made itself
    """

    module: nn.Module
    start: int
    end: int = 0
    seconds: float = 0.0
    inner: list[_Call] = field(default_factory=list)


@dataclass
class Trace:
    """What a run has shown.

    Attributes:
        root: the call of the model
        output: what it returned
        used: for each parameter and buffer, the place of its first use by an operation
        kept: the tensors that modules have put on themselves, and the buffers that have changed, each with the place
            where it was made or first used, and that of its last use
        keeps_tensors: whether modules have put any tensors on themselves
        drawn: the generators of the model's own that it has drawn from, each time with the place
        labels: the argument that a cross entropy has taken for its target, and the label that it leaves out
        epsilon: the rounding error of the coarsest numbers in it, relative to 1
    """

    root: _Call
    output: Any
    used: dict[Tensor, int]
    kept: list[tuple[nn.Module, str, int, int]]
    keeps_tensors: bool
    drawn: list[tuple[torch.Generator, int]]
    labels: tuple[str, int] | None
    epsilon: float

    def calls(self) -> list[_Call]:
        """Return all calls."""
        pending = [self.root]
        for call in pending:  # The list grows meanwhile.
            pending += call.inner
        return pending

    def seconds(self, modules: Iterable[nn.Module]) -> float:
        """Return the time of all calls of these modules."""
        wanted = set(modules)
        return sum([call.seconds for call in self.calls() if call.module in wanted])


@dataclass
class Part:
    """A part of the spine.

    Attributes:
        modules: its modules, by name
        parameters: the number of elements of its parameters
        size: the bytes of its parameters and buffers
        seconds: the time of its forward
    """

    modules: dict[str, nn.Module]
    parameters: int
    size: int
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The names of its first and last modules."""
        names = list(self.modules)
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


class _Uses(TorchFunctionMode):
    """Notes the first use of parameters and buffers, and where each tensor was made and last used."""

    def __init__(self, clock: list[int], module: nn.Module, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self._clock = clock
        parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        self._known = {*parameters, *[id(buffer) for buffer in module.buffers()]}
        #: By address, the names of parameters, and of arguments.
        self._parameters = {address: name for name, one in module.named_parameters() if (address := _address(one))}
        tensors = [(name, one) for name, value in arguments.items() for _, one in each(value)]
        self._arguments = {address: (name, one) for name, one in tensors if (address := _address(one))}
        self._arguments.pop(0, None)
        self.made: dict[int, int] = {}
        self.used: dict[Tensor, int] = {}
        self.last: dict[int, int] = {}
        self.drawn: list[tuple[torch.Generator, int]] = []
        self.labels: tuple[str, int] | None = None
        self.kinds = {parameter.dtype for parameter in module.parameters()}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for _, tensor in each((args, kwargs)):
            self.last[id(tensor)] = self._clock[0]
            if id(tensor) in self._known:
                self.used.setdefault(tensor, self._clock[0])
        if (changes_shape(func) or changes_values(func)) and not _assigns_itself(func, args):
            self._refuse_changed(func, args[:1])
        elif "out" in kwargs:
            self._refuse_changed(func, kwargs["out"])
        elif func in (functional.cross_entropy, functional.nll_loss):
            self._note_labels(inspect.signature(func).bind(*args, **kwargs).arguments)
        if kwargs.get("generator") is not None:
            self.drawn.append((kwargs["generator"], self._clock[0]))
        result = func(*args, **kwargs)
        for _, tensor in each(result):
            self.made[id(tensor)] = self._clock[0]
            self.kinds.add(tensor.dtype)
        return result

    def _refuse_changed(self, func: Callable[..., Any], changed: Any) -> None:
        for _, tensor in each(changed):
            name = self._parameters.get(_address(tensor))
            if name is not None and func.__name__ != "requires_grad_":
                raise RuntimeError(
                    f"the forward changes the parameter '{name}' (by '{func.__name__}'), which micro-batches would do "
                    "again and again, while others use it; change parameters between two calls, such as after "
                    "optimizer.step()"
                )

    def _note_labels(self, arguments: Mapping[str, Any]) -> None:
        target = arguments["target"]
        name, argument = self._arguments.get(_address(target), ("", None))
        if argument is not None and argument.numel() == target.numel():
            self.labels = name, arguments.get("ignore_index", -100)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take this mode off the stack for a ``with`` block, unless the model has put one of its own on top."""
        mode = pop_function_mode()
        if mode is not self:
            push_function_mode(mode)
        try:
            yield
        finally:
            if mode is self:
                push_function_mode(mode)


def _assigns_itself(func: Callable[..., Any], args: Any) -> bool:
    """Return whether ``tensor.data`` gets the memory that it has, as by ``module.to(its dtype)``."""
    if func.__name__ != "__set__" or len(args) < 2 or not isinstance(args[1], Tensor):
        return False
    return args[0].dtype == args[1].dtype and _address(args[0]) == _address(args[1]) != 0


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none that can be told, as on the meta device."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # of a function transform of torch.func
        return 0


def trace(module: nn.Module, run: Callable[[], Any], arguments: Mapping[str, Any]) -> Trace:
    """Run a module, and return what it calls in which order.

    Args:
        module: the module
        run: calls the module's forward
        arguments: its arguments, by name

    Raises:
        RuntimeError: the forward changes a parameter in place; it has not been changed.
    """
    clock = [0]
    root = _Call(module, 0)
    stack = [root]
    uses = _Uses(clock, module, arguments)

    def probe(child: nn.Module) -> Callable[..., Any]:
        inner = own_call(child)

        def call(*args: Any, **kwargs: Any) -> Any:
            clock[0] += 1
            made = _Call(child, clock[0])
            stack[-1].inner.append(made)
            stack.append(made)
            begin = time.perf_counter()
            try:
                if child in compiled:
                    with uses.paused():
                        return (inner or plain_call(child))(*args, **kwargs)
                return plain_call(child)(*args, **kwargs)
            finally:
                made.seconds = time.perf_counter() - begin
                clock[0] += 1
                made.end = clock[0]
                stack.pop()

        return call

    # The compiler must find the modules within as they are.
    compiled = {child for child in module.modules() if own_call(child) is not None or is_optimized(child)}
    within = {inner for child in compiled for inner in child.modules() if inner is not child}
    probes = {child: probe(child) for child in module.modules() if child is not module and child not in within}
    before = {id(tensor) for _, _, tensor in attributes(module)}
    buffers = [(child, name, buffer) for child in module.modules() for name, buffer in child._buffers.items()]
    counts = versions([buffer for _, _, buffer in buffers])
    with _replaced(probes), uses:
        output = run()
    root.end = clock[0] + 1
    kept = [
        (child, name, uses.made.get(id(tensor), uses.last[id(tensor)]), uses.last[id(tensor)])
        for child, name, tensor in attributes(module)
        if id(tensor) in uses.last and id(tensor) not in before
    ]
    keeps_tensors = any([id(tensor) not in before for _, _, tensor in attributes(module)])
    changed = [now != then for now, then in zip(versions([buffer for _, _, buffer in buffers]), counts)]
    kept += [
        (child, name, uses.used[buffer], uses.last[id(buffer)])
        for (child, name, buffer), is_changed in zip(buffers, changed)
        if is_changed and buffer is not None and buffer in uses.used
    ]
    kept += [
        (child, name, uses.made.get(id(child._buffers[name]), 0), uses.last[id(child._buffers[name])])
        for child, name, buffer in buffers
        if child._buffers.get(name) is not buffer and id(child._buffers.get(name)) in uses.last
    ]
    rounded = [kind for kind in uses.kinds if kind.is_floating_point or kind.is_complex]
    epsilon = max([torch.finfo(kind).eps for kind in rounded], default=0.0)
    return Trace(root, output, uses.used, kept, keeps_tensors, uses.drawn, uses.labels, epsilon)


@contextmanager
def _replaced(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    before = {module: own_call(module) for module in calls}
    try:
        for module, call in calls.items():
            replace_call(module, call)
        yield
    finally:
        for module, own in before.items():
            replace_call(module, own)


def spine_of(module: nn.Module, traced: Trace, n: int, opened: list[str]) -> list[Part]:
    """Return the spine.

    Args:
        module: the model
        traced: what a run has shown
        n: the number of partitions, which the spine should be fine enough for
        opened: names of modules at which a partition should begin
    """
    return _Spine(module, traced, n).parts(opened)


class _Spine:
    def __init__(self, module: nn.Module, traced: Trace, n: int) -> None:
        self._root = module
        self._n = n
        self._names = {child: name for name, child in module.named_modules()}
        self._elements = {
            element
            for container in module.modules()
            if isinstance(container, (nn.ModuleList, nn.Sequential))
            for element in container.children()
        }
        self._calls: dict[nn.Module, list[_Call]] = {}
        #: The modules that are called within a call of themselves, which cannot be opened.
        self._recursive: set[nn.Module] = set()
        self._gather(traced.root, frozenset())
        self._size = {child: sum([parameter.numel() for parameter in child.parameters()]) for child in self._calls}
        self._total = max(1, self._size[module])

    def _gather(self, call: _Call, around: frozenset[nn.Module]) -> None:
        self._calls.setdefault(call.module, []).append(call)
        if call.module in around:
            self._recursive.add(call.module)
        for inner in call.inner:
            self._gather(inner, around | {call.module})

    def parts(self, opened: list[str]) -> list[Part]:
        spine = self._inner(self._root)
        if not spine:
            return []
        closed: set[nn.Module] = set()
        wanted = {name for name in opened if name}
        while True:
            parts = self._grouped(spine)
            candidate = self._to_open(parts, closed, wanted)
            if candidate is None:
                return [self._part(modules) for modules in parts]
            finer = [one for module in spine for one in (self._inner(module) if module is candidate else [module])]
            finer = list(dict.fromkeys(finer))
            is_finer = len(self._grouped(finer)) > len(parts)
            if is_finer or self._holds(candidate, wanted) or len(self._inner(candidate)) == 1:
                spine = finer
            closed.add(candidate)

    def _holds(self, module: nn.Module, names: set[str]) -> bool:
        """Return whether one of these names is that of a module within a module."""
        return any(name.startswith(f"{self._names[module]}.") for name in names)

    def _inner(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules with parameters that a module calls itself; calls through modules without them count."""
        if module in self._recursive:
            return []
        result: dict[nn.Module, None] = {}
        pending = [inner for call in self._calls[module] for inner in call.inner]
        while pending:
            call = pending.pop(0)
            if self._size[call.module]:
                result[call.module] = None
            else:
                pending[:0] = call.inner
        return list(result)

    def _to_open(self, parts: list[list[nn.Module]], closed: set[nn.Module], wanted: set[str]) -> nn.Module | None:
        able = [one for part in parts for one in part if one not in closed and self._inner(one)]
        for one in able:
            if self._holds(one, wanted):
                return one
        for one in able:
            coarse = self._size[one] * 2 * self._n > self._total
            if self._leads_to_elements(one) and (coarse or one not in self._elements):
                return one
        if len(parts) < self._n and able:
            return max(able, key=lambda one: self._size[one])
        return None

    def _leads_to_elements(self, module: nn.Module) -> bool:
        """Return whether a module calls several elements of one container, itself or through modules of its own."""
        inner = self._inner(module)
        elements = [one for one in inner if one in self._elements]
        if len({self._names[one].rpartition(".")[0] for one in elements}) < len(elements):
            return True
        return any(self._leads_to_elements(one) for one in inner if one not in self._elements)

    def _grouped(self, spine: list[nn.Module]) -> list[list[nn.Module]]:
        """Return the modules in the order of their calls, together if they cannot be kept apart."""
        first = {one: min([call.start for call in self._calls[one]]) for one in spine}
        groups: list[list[nn.Module]] = []
        end = -1
        for one in sorted(spine, key=first.__getitem__):
            if first[one] < end:
                groups[-1].append(one)
            else:
                groups.append([one])
            end = max(end, *[call.end for call in self._calls[one]])
        return groups

    def _part(self, modules: list[nn.Module]) -> Part:
        parameters = {parameter for one in modules for parameter in one.parameters()}
        buffers = {buffer for one in modules for buffer in one.buffers()}
        return Part(
            {self._names[one]: one for one in modules},
            sum([parameter.numel() for parameter in parameters]),
            bytes_of((*parameters, *buffers)),
        )
