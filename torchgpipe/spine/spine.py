"""The spine of a module: what it calls one after the other, so that neighbours can be put on different devices.

A run on a sample shows which modules call which. The spine begins with the module itself, and is opened where it is
coarse:

    GPT2LMHeadModel ──► transformer ──► wte │ wpe │ h.0 │ h.1 │ ... │ ln_f    opened, for elements of a ModuleList
                    └─► lm_head                                               not opened, for it has no parts

A part of the spine is one module. A module that is called again later computes where the model is by then, see `twin`;
one that cannot, such as a batch norm, is one part with all that is called in between. The spine follows from the
structure and the parameters alone, so every process and every copy finds the same.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
    replace_call,
    versions,
    without_function_mode,
)
from torchgpipe.model.attached import with_attached
from torchgpipe.model.untouched import attributes, changes_no_number
from torchgpipe.model.values import each
from torchgpipe.spine.abstract import see
from torchgpipe.spine.glue import changes_in_place
from torchgpipe.spine.layout import Part
from torchgpipe.spine.twin import may_have_twin

__all__ = ["ChangesParameter", "Spine", "Trace", "trace"]


@dataclass
class Call:
    """A call of a module.

    Attributes:
        name: the name of the module in the model
        start: its place in the order of all events
        is_within_itself: whether it was made within another call of the same module
        end: the place of its return
        seconds: the time that it took
        inner: the calls that it made itself
    """

    name: str
    start: int
    is_within_itself: bool = False
    end: int = 0
    seconds: float = 0.0
    inner: list[Call] = field(default_factory=list)


@dataclass
class Trace:
    """What a run has shown.

    Attributes:
        calls: all calls in the order of their starts; the first is that of the model
        output: what the model returned
        used: for each tensor that modules had before, the places of its uses by operations, in their order
        keeping: the names of the modules that have put tensors on themselves, or changed their buffers
        labels: the argument that a cross entropy has taken for its target, and the label that it leaves out
        shifts: whether it has taken them without the first of each row
        epsilon: the rounding error of the coarsest numbers in it, relative to 1
    """

    calls: list[Call]
    output: Any
    used: dict[Tensor, list[int]]
    keeping: set[str]
    labels: tuple[str, int] | None
    shifts: bool
    epsilon: float


class _Uses(TorchFunctionMode):
    """Notes where each tensor of a model was first used by an operation, which argument has labels, and all dtypes."""

    def __init__(self, module: nn.Module, arguments: Mapping[str, Any], only_lasting: bool) -> None:
        super().__init__()
        self._only_lasting = only_lasting
        #: The place in the order of all events.
        self.now = 0
        parameters = dict(module.named_parameters())
        #: The tensors that modules have before the run, by their ids.
        self._before: dict[int, Tensor] = {id(tensor): tensor for tensor in (*parameters.values(), *module.buffers())}
        self._parameters = {_address(parameter): (name, parameter) for name, parameter in parameters.items()}
        self._parameters.pop(0, None)
        #: The parameters with several names. Another partition may use a copy, which a change in place does not reach.
        names = Counter([parameter for _, parameter in module.named_parameters(remove_duplicate=False)])
        self._shared = {parameter for parameter, count in names.items() if count > 1}
        #: The arguments that may be labels, each with its address, and those of them that are embedded.
        self._integers = {
            name: (_address(value), value)
            for name, value in arguments.items()
            if value.dim() and not value.is_floating_point() and value.dtype != torch.bool
        }
        self._embedded: set[str] = set()
        self.dtypes = {parameter.dtype for parameter in parameters.values()}
        self.used: dict[Tensor, list[int]] = {}
        self.labels: tuple[str, int] | None = None
        self.shifts = False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        for _, tensor in each((args, kwargs)):
            if id(tensor) in self._before:
                places = self.used.setdefault(tensor, [])
                if self.now not in places[-1:]:
                    places.append(self.now)
        changed: tuple[str, nn.Parameter] | None = None
        if changes_in_place(func) and not _assigns_itself(func, args) and func.__name__ != "requires_grad_":
            changed = self._parameter_in(args[:1])
        elif "out" in kwargs:
            changed = self._parameter_in(kwargs["out"])
        elif func in (functional.cross_entropy, functional.nll_loss):
            called = inspect.signature(func).bind(*args, **kwargs).arguments
            self._note_labels(called["target"], called.get("ignore_index", -100))
        elif func is functional.embedding:
            self._embedded |= {
                name
                for name, (address, _) in self._integers.items()
                if address == _address((*args, *kwargs.values())[0])
            }
        result = func(*args, **kwargs) if changed is None else self._write(func, args, kwargs, *changed)
        self.dtypes |= {tensor.dtype for _, tensor in each(result)}
        return result

    def _write(self, func: Callable[..., Any], args: Any, kwargs: Any, name: str, parameter: nn.Parameter) -> Any:
        """Run an operation that writes to a parameter, if that leaves the parameter as it is."""
        is_same = changes_no_number(func, args, kwargs)
        if is_same and parameter not in self._shared:
            count = versions([parameter])
            result = func(*args, **kwargs)
            # Else autograd would refuse the backward of an earlier micro-batch, which has saved the parameter.
            if versions([parameter]) == count:
                return result
        if self._only_lasting and (is_same or func.__name__ == "__set__"):  # Other memory is put back.
            return func(*args, **kwargs)
        raise ChangesParameter(name, f"'{func.__name__}'")

    def _parameter_in(self, value: Any) -> tuple[str, nn.Parameter] | None:
        """Return the name of the first parameter whose memory a tensor in a value has, and the parameter."""
        found = [self._parameters.get(_address(tensor)) for _, tensor in each(value)]
        return next((named for named in found if named is not None), None)

    def _note_labels(self, target: Any, ignored: int = -100) -> None:
        """Note the argument that a cross entropy has got for its labels, perhaps without the first of each row."""
        if not isinstance(target, Tensor) or target.is_floating_point() or self.labels is not None:
            return
        # What is embedded comes last, as samples often give the same words as labels.
        for name, (_, argument) in sorted(self._integers.items(), key=lambda item: item[0] in self._embedded):
            if target.is_meta or argument.is_meta:
                is_it = argument.numel() == target.numel() and _address(argument) == _address(target)
                is_it &= name not in self._embedded  # Without addresses, all are.
            else:
                next_ones = argument[..., 1:], functional.pad(argument, (0, 1), value=ignored)[..., 1:]
                is_it = any([_has_elements(target, labels) for labels in (argument, *next_ones)])
            if is_it:
                self.labels = name, ignored
                self.shifts = not target.is_meta and not _has_elements(target, argument)
                return


class ChangesParameter(RuntimeError):
    """The forward changes a parameter.

    Args:
        name: the parameter
        how: what changes it
    """

    def __init__(self, name: str, how: str) -> None:
        super().__init__(
            f"the forward changes the parameter '{name}' (by {how}), which micro-batches would do again and again, "
            "while others use it; change parameters between two calls, such as after optimizer.step(); if it does so "
            "in its first call only, as a layer that packs its weights, let the model run once before; or switch that "
            "off, as by rescale_every=0 of RWKV"
        )


def _refuse_replaced(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a forward that has put a new trained one in the place of a parameter, and put that back.

    To tie two parameters is no harm, nor to pack a frozen one.
    """
    now, known = dict(module.named_parameters(remove_duplicate=False)), set(parameters.values())
    new = {name for name, parameter in now.items() if parameter.requires_grad and parameter not in known}
    replaced = [name for name in parameters if name in new]
    for name in replaced:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, parameters[name])
    if replaced:
        raise ChangesParameter(replaced[0], "another one in its place")


def _assigns_itself(func: Callable[..., Any], args: Any) -> bool:
    """Return whether ``tensor.data`` gets the memory that it has, as by ``module.to(its dtype)``."""
    if func.__name__ != "__set__" or len(args) < 2 or not isinstance(args[1], Tensor):
        return False
    return args[0].dtype == args[1].dtype and _address(args[0]) == _address(args[1]) != 0


def _has_elements(target: Tensor, labels: Tensor) -> bool:
    return target.numel() == labels.numel() > 0 and torch.equal(target.reshape(-1), labels.reshape(-1).to(target))


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none that can be told, as on the meta device."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # of a function transform of torch.func
        return 0


def trace(
    module: nn.Module, run: Callable[[], Any], arguments: Mapping[str, Tensor], *, only_lasting: bool = False
) -> Trace:
    """Run a module, and return what it calls in which order.

    Args:
        module: the module
        run: calls the module's forward
        arguments: the tensors among its arguments, by path
        only_lasting: whether to refuse only what would leave other numbers in a parameter

    Raises:
        ChangesParameter: the forward changes a parameter, or puts another one in its place; it is as it was.
    """
    calls = [Call("", 0)]
    stack = [*calls]
    uses = _Uses(module, arguments, only_lasting)

    def probe(child: nn.Module, name: str) -> Callable[..., Any]:
        inner = own_call(child)

        def run_child(*args: Any, **kwargs: Any) -> Any:
            uses.now += 1
            call = Call(name, uses.now, is_within_itself=any([outer.name == name for outer in stack]))
            calls.append(call)
            stack[-1].inner.append(call)
            stack.append(call)
            begin = time.perf_counter()
            try:
                with without_function_mode(lambda mode: mode is uses) if child in compiled else nullcontext():
                    output = (inner or plain_call(child))(*args, **kwargs)
                see((args, kwargs, output))
                return output
            finally:
                call.seconds = time.perf_counter() - begin
                uses.now += 1
                call.end = uses.now
                stack.pop()

        return run_child

    # The compiler must find the modules within as they are.
    compiled = {child for child in module.modules() if own_call(child) is not None or is_optimized(child)}
    within = {inner for child in compiled for inner in child.modules() if inner is not child}
    names = {child: name for name, child in module.named_modules()}
    probes = {child: probe(child, name) for child, name in names.items() if name and child not in within}
    buffers, known = dict(module.named_buffers()), {id(tensor): tensor for _, _, tensor in attributes(module)}
    counts = versions(list(buffers.values()))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    with _replaced(probes), uses:
        output = run()
    _refuse_replaced(module, parameters)
    calls[0].end = uses.now + 1
    keeping = {names.get(child, "") for child, _, tensor in attributes(module) if id(tensor) not in known}
    keeping |= {
        name.rpartition(".")[0] for name, a, b in zip(buffers, counts, versions(list(buffers.values()))) if a != b
    }
    rounded = [dtype for dtype in uses.dtypes if dtype.is_floating_point or dtype.is_complex]
    return Trace(
        calls,
        output,
        used=uses.used,
        keeping=keeping,
        labels=uses.labels,
        shifts=uses.shifts,
        epsilon=max([torch.finfo(dtype).eps for dtype in rounded], default=0.0),
    )


@contextmanager
def _replaced(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    before = {module: own_call(module) for module in calls}
    try:
        for module, call in calls.items():
            replace_call(module, call)
        yield
    finally:
        for module, call_before in before.items():
            replace_call(module, call_before)


class Spine:
    """The search for the spine. Modules go by their names.

    Args:
        module: the model
        traced: what a run has shown
        n: the number of partitions, which the spine should be fine enough for
    """

    def __init__(self, module: nn.Module, traced: Trace, n: int) -> None:
        self._n = n
        self._modules = dict(module.named_modules())
        names = {child: name for name, child in self._modules.items()}
        self._elements = {
            names[element]
            for container in module.modules()
            if isinstance(container, (nn.ModuleList, nn.Sequential))
            for element in container.children()
        }
        self._calls: dict[str, list[Call]] = {}
        for call in traced.calls:
            self._calls.setdefault(call.name, []).append(call)
        #: The modules that are called within a call of themselves, which cannot be opened.
        self._recursive = {call.name for call in traced.calls if call.is_within_itself}
        self._size = {
            name: sum([parameter.numel() for parameter in self._modules[name].parameters()]) for name in self._calls
        }
        self._total = max(1, self._size[""])
        state = [f"{name}." for name in traced.keeping]
        #: The modules that are called several times, and whose later calls need not be where the first one is.
        self._again = {
            name
            for name, calls in self._calls.items()
            if len(calls) > 1 and may_have_twin(self._modules[name]) and not _holds(name, state)
        }

    def parts(self, opened: list[str]) -> list[Part]:
        """Return the parts of the spine; a partition should begin at modules of the names ``opened``."""
        spine = self._inner("")
        if not spine:
            return []
        closed: set[str] = set()
        wanted = [name for name in opened if name]
        while True:
            groups = self._grouped(spine)
            candidate = self._to_open(groups, closed, wanted)
            if candidate is None:
                return [self._part(group) for group in groups]
            inner = self._inner(candidate)
            k = spine.index(candidate)
            finer = list(dict.fromkeys([*spine[:k], *inner, *spine[k + 1 :]]))
            is_finer = len(self._grouped(finer)) > len(groups)
            if is_finer or _holds(candidate, wanted) or len(inner) == 1:
                spine = finer
            closed.add(candidate)

    def _inner(self, name: str) -> list[str]:
        """Return the modules with parameters that a module calls itself; calls through modules without them count."""
        if name in self._recursive:
            return []
        result: dict[str, None] = {}
        pending = [inner for call in self._calls[name] for inner in call.inner]
        while pending:
            call = pending.pop(0)
            if self._size[call.name]:
                result[call.name] = None
            else:
                pending[:0] = call.inner
        return list(result)

    def _to_open(self, groups: list[list[str]], closed: set[str], wanted: list[str]) -> str | None:
        able = [name for group in groups for name in group if name not in closed and self._inner(name)]
        for name in able:
            if _holds(name, wanted):
                return name
        for name in able:
            is_coarse = self._size[name] * 2 * self._n > self._total
            if self._leads_to_elements(name) and (is_coarse or name not in self._elements):
                return name
        if len(groups) < self._n and able:
            return max(able, key=self._size.__getitem__)
        return None

    def _leads_to_elements(self, name: str) -> bool:
        """Return whether a module calls several elements of one container, itself or through modules of its own."""
        elements = self._elements_in(name)
        return len({child.rpartition(".")[0] for child in elements}) < len(elements)

    def _elements_in(self, name: str) -> set[str]:
        return {one for child in self._inner(name) for one in {child} & self._elements or self._elements_in(child)}

    def _grouped(self, spine: list[str]) -> list[list[str]]:
        """Return the modules in the order of their calls, together if they cannot be kept apart."""
        groups: list[list[str]] = []
        end = -1
        for name in sorted(spine, key=lambda name: self._calls[name][0].start):
            calls = self._calls[name]
            if calls[0].start < end:
                groups[-1].append(name)
            else:
                groups.append([name])
            end = max(end, *[call.end for call in (calls[:1] if name in self._again else calls)])
        return groups

    def _part(self, group: list[str]) -> Part:
        modules = [self._modules[name] for name in group]
        parameters = {parameter for module in modules for parameter in module.parameters()}
        buffers = {buffer for module in modules for buffer in module.buffers()}
        again = next((name for name in group[:-1] if len(self._calls[name]) > 1 and name not in self._again), "")
        elements = sum([parameter.numel() for parameter in parameters])
        return Part(group, elements, bytes_of((*with_attached(parameters), *buffers)), again)


def _holds(name: str, wanted: list[str]) -> bool:
    """Return whether one of the wanted names is that of a module within a module."""
    return any(inner.startswith(f"{name}.") for inner in wanted)
