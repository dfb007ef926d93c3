"""Stand-ins: tensors without values in the place of tensors that another process has.

A stand-in has the shape, the strides, the dtype and a device of this process; what is computed with a stand-in is a
stand-in again. The dispatcher of PyTorch calls `StandIn.__torch_dispatch__` below autograd and autocast, which treat a
stand-in as any tensor: it requires grad, has nodes of autograd, and is cast.

What an operation returns follows from the operation and the forms of its arguments. The first time, the operation runs
on PyTorch's fake tensors, which takes about a hundred times as long as to look up what it has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import (
    disabled_torch_function,
    fake_tensor_mode,
    make_wrapper,
    without_dispatch,
    written,
)

__all__ = ["Form", "NoValues", "StandIn", "computed_as_a_whole", "describe", "form_of"]


class NoValues(RuntimeError):
    """An operation needs values that another process has."""


class Form(NamedTuple):
    """All of a tensor but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_CPU = torch.device("cpu")


class StandIn(Tensor):
    """A tensor without values.

    Args:
        form: its form
        home: the column that has computed the tensor that it stands for
        requires_grad: whether that requires grad

    Attributes:
        form, home: see above
        kept: the values that this process has received, if a checkpoint runs again with them
    """

    form: Form
    home: int
    kept: Tensor | None = None

    @staticmethod
    def __new__(cls, form: Form, home: int, requires_grad: bool = False) -> StandIn:
        if form.device.type == "cpu":  # No tensor is on 'cpu:0', whatever it was asked to be.
            form = form._replace(device=_CPU)
        shape, stride, dtype, device = form
        self: StandIn = make_wrapper(
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        self.form, self.home = form, home
        return self

    __torch_function__ = disabled_torch_function

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape, _stride, dtype, device = self.form
        return f"StandIn({list(shape)}, dtype={dtype}, device='{device}', computed by column {self.home} elsewhere)"

    def renew_form(self) -> None:
        """Take over what has changed in place: the dtype, as by ``module.half()``."""
        self.form = self.form._replace(dtype=self.dtype)

    def __deepcopy__(self, memo: Any) -> StandIn:
        copied = StandIn(self.form, self.home, self.requires_grad)
        vars(copied).update(vars(self))  # Whether it is a parameter.
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        effect, tensors = _found(func, args, kwargs or {})
        home = max([tensor.home for tensor in tensors if isinstance(tensor, StandIn)])
        for number in effect.written:
            tensor = tensors[number]
            if not isinstance(tensor, StandIn):
                raise NoValues(
                    f"'{func}' writes what column {home} has computed, in another process, to a tensor of shape "
                    f"{tuple(tensor.shape)} that all processes have; let one module of the spine do both"
                )
            tensor.home = home
        for number, form in effect.reshaped:
            _reshape(tensors[number], form)
        return _made(effect.value, tensors, home)


def computed_as_a_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function does that writes to a tensor which it makes itself, as `pad_sequence` does.

    Its operations cannot be told one by one: what it makes has values in every process.

    Raises:
        NoValues: it needs values.
    """
    effect, tensors = _found(func, args, kwargs)
    home = max([tensor.home for tensor in tensors if isinstance(tensor, StandIn)])
    made = _made(effect.value, tensors, home)
    if isinstance(made, StandIn) and torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):
        made.requires_grad_(made.is_floating_point())
    return made


def _found(func: Any, args: Any, kwargs: Any) -> tuple[_Effect, list[Tensor]]:
    """Return what an operation does, and the tensors among its arguments, in the order of their numbers."""
    tensors: list[Tensor] = []
    key = (func, *[_describe_argument(value, tensors) for value in (*args, *kwargs.items())])
    effect = _known.get(key)
    if effect is None:
        if len(_known) >= _MOST:  # As of an operation with another number in each step.
            _known.clear()
        effect = _known[key] = _effect_of(func, args, kwargs, tensors)
    return effect, tensors


def _reshape(tensor: Tensor, form: Form) -> None:
    """Give a stand-in another form."""
    assert isinstance(tensor, StandIn), "what only looks like a stand-in is not written"
    with without_dispatch():
        torch.ops.aten.as_strided_.default(tensor, form.shape, form.stride)
    tensor.form = form


def form_of(tensor: Tensor) -> Form:
    """Return the form of a tensor."""
    if isinstance(tensor, StandIn):
        return tensor.form
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return Form(tuple(tensor.shape), stride, tensor.dtype, tensor.device)


class _Effect(NamedTuple):
    """What an operation does, for arguments of some forms.

    Attributes:
        value: what it returns, with a `Form` in the place of a new tensor, and an `_Argument` in that of an argument
        written: the numbers of the tensors among its arguments that it changes
        reshaped: the numbers of those that get another form, as by `squeeze_`, and that form
    """

    value: Any
    written: Sequence[int]
    reshaped: Sequence[tuple[int, Form]]


class _Argument(NamedTuple):
    number: int


def _made(value: Any, arguments: Sequence[Tensor], home: int) -> Any:
    kind = type(value)
    if kind is Form:
        return StandIn(value, home)
    if kind is _Argument:
        return arguments[value.number]
    if kind is tuple or kind is list:
        return kind([_made(item, arguments, home) for item in value])
    return value


#: The most effects that are kept.
_MOST = 20_000

_known: dict[Any, _Effect] = {}


def describe(value: Any, other: Callable[[Any], Any], tensors: list[Tensor]) -> Any:
    """Return what tells a value from others as far as forms go: hashable, and equal for equal forms.

    Args:
        value: a value
        other: describes what is no tensor, number, word, tuple or list
        tensors: gets the tensors in the value, as they are described
    """
    kind = type(value)
    if kind is StandIn:
        tensors.append(value)
        return value.form, value.requires_grad
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal.
    if kind is tuple or kind is list:
        return (kind, *[describe(item, other, tensors) for item in value])
    if kind is dict:
        return (kind, *value, *[describe(item, other, tensors) for item in value.values()])
    if isinstance(value, Tensor):
        tensors.append(value)
        # Like a stand-in: both ends of a crossing look up the same words.
        described = form_of(value), value.requires_grad
        return described if kind is Tensor or kind is nn.Parameter else (*described, kind)
    return other(value)


_PLAIN = {int, float, str, bool, type(None), complex}


def _describe_argument(value: Any, tensors: list[Tensor]) -> Any:
    return describe(value, _itself, tensors)  # Of operations, the rest is hashable: dtypes, devices, layouts.


def _itself(value: Any) -> Any:
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, which are nested lists at most."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _exchanged(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_exchanged(item, change) for item in value])
    if isinstance(value, dict):
        return {key: _exchanged(item, change) for key, item in value.items()}
    return value


def _effect_of(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> _Effect:
    """Find what an operation does, on fake tensors.

    Args:
        func: the operation
        args, kwargs: its arguments
        given: the tensors among them, in the order of their numbers

    Raises:
        NoValues: it needs values.
    """
    mode = fake_tensor_mode()
    fakes: dict[int, Tensor] = {}
    places = [form.device for form in map(form_of, given) if form.device.type != "cpu"]

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            shape, stride, dtype, device = form_of(tensor)
            if places and device.type == places[0].type:  # A column of another process has its tensors in one place.
                device = places[0]
            fakes[id(tensor)] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return fakes[id(tensor)]

    try:
        with mode:
            own_args, own_kwargs = _exchanged(args, fake), _exchanged(kwargs, fake)
            result = func(*own_args, **own_kwargs)
    except Exception as error:
        if "Dynamic" in type(error).__name__ or "DataDependent" in type(error).__name__:
            shapes = [tuple(tensor.shape) for tensor in given if isinstance(tensor, StandIn)]
            raise NoValues(
                f"'{func}' needs the values of tensors of shapes {shapes}, which another process has"
            ) from None
        raise
    forms = [(k, form_of(tensor), form_of(fakes[id(tensor)])) for k, tensor in enumerate(given)]
    reshaped = [(k, after._replace(device=before.device)) for k, before, after in forms if before[:2] != after[:2]]
    of_given = {id(tensor): k for k, tensor in reversed([*enumerate(given)])}
    numbers = {id(fakes[key]): k for key, k in of_given.items()}
    changed = [of_given[id(tensor)] for tensor in _tensors(written(func, args, kwargs))]

    def formed(tensor: Tensor) -> Any:
        number = numbers.get(id(tensor))
        return form_of(tensor) if number is None else _Argument(number)

    return _Effect(_exchanged(result, formed), changed, reshaped)
