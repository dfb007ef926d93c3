"""Aliases in the place of parameters while a mini-batch runs.

An alias has the memory of a parameter and a ``.grad`` of its own, to which the cells of one column add. At the end, the
sum goes through the parameter, as the gradient of one plain layer would: hooks hear it once, and so does
DistributedDataParallel. A parameter that several columns share has an alias in each of them, so the order of the sum
does not depend on the order of threads. On another device the alias is a copy, made once for each mini-batch.

A gradient that arrives while no cell is being differentiated would stay at the alias, unnoticed: a forward calls
backward(), or a hook has kept a tensor of a module, which the caller differentiates by itself. Where that can happen,
aliases are watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.gradients import sum_of
from torchgpipe.frames.cell import differentiated_by_itself

__all__ = ["Aliases", "Slot", "filling_aliases"]

#: A place of a parameter: the module, the name there, and the column.
Slot = tuple[nn.Module, str, int]


class _Pass(threading.local):
    is_a_cell = False


#: Whether this thread differentiates a cell.
_pass = _Pass()


@contextmanager
def filling_aliases() -> Iterator[None]:
    """Let gradients arrive at aliases in a ``with`` block, in this thread."""
    _pass.is_a_cell = True
    try:
        yield
    finally:
        _pass.is_a_cell = False


def _refuse_outside(alias: Tensor) -> None:
    if not _pass.is_a_cell:
        raise differentiated_by_itself("the model")


class Aliases:
    """The aliases of the parameters of a model during a mini-batch.

    Args:
        slots: where parameters are
        devices: the device of each column
        moves: returns whether a tensor must be copied from one device to another
        device_of: returns the device of a tensor, or None if it belongs to every device
        lock: held while the modules have the aliases, which other threads must not meet
        backward: whether gradients are wanted
        watched: the columns in which gradients that do not come from a cell are refused

    Attributes:
        trained: the parameters that have aliases with gradients, each once
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        devices: list[torch.device],
        moves: Callable[[torch.device, torch.device], bool],
        device_of: Callable[[Tensor], torch.device | None],
        lock: AbstractContextManager[Any],
        *,
        backward: bool,
        watched: Container[int] = (),
    ) -> None:
        self._devices, self._moves, self._device_of = devices, moves, device_of
        self._backward, self._watched = backward, watched
        self._lock = lock
        self._by_column: dict[tuple[Tensor, int], Tensor] = {}
        self._parameters: dict[Tensor, Tensor] = {}
        #: The aliases of each trained parameter, by column.
        self._of_trained: dict[Tensor, dict[int, Tensor]] = {}
        self._in_column: list[list[Tensor]] = [[] for _ in devices]
        self._installed: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module, name, column in slots:
            parameter = module._parameters[name]
            if parameter is not None and not is_lazy(parameter):
                alias = self._alias(parameter, column)
                if alias is not parameter:
                    self._installed.append((module, name, parameter, alias))
        self.trained = list(self._of_trained)

    def _alias(self, parameter: Tensor, column: int) -> Tensor:
        key = (parameter, column)
        if key in self._by_column:
            return self._by_column[key]
        trains = self._backward and parameter.requires_grad
        there, device = self._device_of(parameter), self._devices[column]
        away = there is not None and self._moves(there, device)
        if not trains and not away:
            return parameter
        values = parameter.detach()
        alias = nn.Parameter(values.to(device, copy=True) if away else values, requires_grad=trains)
        if vars(parameter):
            vars(alias).update(vars(parameter))
        if trains and column in self._watched:
            alias.register_post_accumulate_grad_hook(_refuse_outside)  # type: ignore[no-untyped-call]
        self._by_column[key] = alias
        self._parameters[alias] = parameter
        self._in_column[column].append(alias)
        if trains:
            self._of_trained.setdefault(parameter, {})[column] = alias
        return alias

    def at(self, tensor: Tensor, column: int) -> Tensor | None:
        """Return the alias in ``column`` of a parameter, given the parameter or an alias of it; None for others."""
        parameter = self._parameters.get(tensor)
        if parameter is None:
            if (tensor, column) not in self._by_column:
                return None
            parameter = tensor
        return self._alias(parameter, column)

    def used(self, leaves: Iterable[Tensor]) -> set[Tensor]:
        """Return the parameters that have one of these leaves as an alias."""
        return {self._parameters[leaf] for leaf in leaves if leaf in self._parameters}

    def take_of(self, column: int) -> Iterator[tuple[Tensor, Leaf]]:
        """Yield the trained parameters that no column before ``column`` has, with their gradients, and leave none.

        An earlier column may add to the aliases of a later one, too: what it recomputes finds those in the modules.
        """
        for parameter in self.trained:
            if min(self._of_trained[parameter]) == column:
                yield parameter, self._take(parameter)

    def of(self, column: int) -> list[Tensor]:
        """Return the aliases in a column."""
        return self._in_column[column]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the modules have the aliases in a ``with`` block."""
        with self._lock:
            done = []
            try:
                for module, name, parameter, alias in self._installed:
                    # The caller may have replaced the parameter between forward and backward.
                    if module._parameters.get(name) is parameter:
                        done.append((module, name, parameter))
                        _assign(module, name, alias)
                yield
            finally:
                for module, name, parameter in done:
                    _assign(module, name, parameter)

    def take(self) -> list[Leaf]:
        """Return the gradients of the trained parameters, and leave none behind."""
        return [self._take(parameter) for parameter in self.trained]

    def _take(self, parameter: Tensor) -> Leaf:
        total: Leaf = None
        own = self._device_of(parameter)
        for _, alias in sorted(self._of_trained[parameter].items()):  # Columns are always added in this order.
            grad, alias.grad = alias.grad, None
            if grad is None:
                continue
            there = self._device_of(grad)
            if there is not None and own is not None and self._moves(there, own):
                grad = grad.to(own)
            total = sum_of(total, grad)
        return total


def _assign(module: nn.Module, name: str, parameter: Tensor) -> None:
    if isinstance(module, nn.RNNBase):
        setattr(module, name, parameter)  # It keeps another list of its parameters.
    else:
        module._parameters[name] = parameter  # type: ignore[assignment]
