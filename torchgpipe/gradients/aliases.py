"""Aliases in the place of parameters while the cells of a program run.

An alias has the memory of a parameter and a ``.grad`` of its own, to which the cells of one column add. A parameter
that several columns share has an alias in each of them, so the order of the sum does not depend on the order of
threads. On another device the alias is a copy, made once for each mini-batch. Where weights live in host memory, an
alias has memory only while its column is resident, see `torchgpipe.offload.aliases`; here all of them always have.

A gradient that arrives while no cell is being differentiated would stay at the alias, unnoticed: a forward calls
backward(), or a hook has kept a tensor of a module, which the caller differentiates by itself. Where that can happen,
aliases are watched; and a pass of the caller that goes through aliases as well as through the output is always refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices import links
from torchgpipe.devices.interrupts import uninterrupted
from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import parameter_like, will_run
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.step_lock import StepLock, calls
from torchgpipe.gradients.sums import sum_of
from torchgpipe.graph.cut import differentiated_by_itself
from torchgpipe.graph.function import nodes_behind, unshared
from torchgpipe.model.attached import attributes_with, has_memory_of, with_attached

__all__ = ["Aliases", "Slot", "weights_of"]

#: A place of a parameter: the module, the name there, and the column.
Slot = tuple[nn.Module, str, int]


class _Differentiating(threading.local):
    is_a_cell = False


#: Whether this thread differentiates a cell.
_differentiating = _Differentiating()


def _refuse_outside(alias: Tensor) -> None:
    if not _differentiating.is_a_cell:
        raise differentiated_by_itself("the model")


class Aliases:
    """The aliases of the parameters of a model during a mini-batch.

    Args:
        slots: where parameters are
        devices: the device of each column
        streams: tells what must be copied; None if all parameters are on the devices of their columns
        lock: held while the modules have the aliases, which other threads must not meet
        backward: whether gradients are wanted
        watched: whether gradients that do not come from a cell are refused

    Attributes:
        trained: the parameters that have aliases with gradients, each once
        all_resident: whether all aliases have memory all the time
    """

    all_resident = True

    def __init__(
        self,
        slots: Iterable[Slot],
        devices: Sequence[torch.device],
        streams: Streams | None,
        lock: StepLock,
        *,
        backward: bool,
        watched: bool = False,
    ) -> None:
        self._devices, self._streams = devices, streams
        self._backward, self._watched = backward, watched
        self._lock, self._calls = lock, calls.get()
        #: The aliases of each parameter, by column.
        self._aliases: dict[Tensor, dict[int, Tensor]] = {}
        #: The parameter of each alias.
        self._parameters: dict[Tensor, Tensor] = {}
        self._in_column: list[list[Tensor]] = [[] for _ in devices]
        self._installed: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module, name, j in slots:
            parameter = module._parameters[name]
            if parameter is not None and not is_lazy(parameter):
                alias = self._alias(parameter, j, f"'{name}' of a {type(module).__name__}")
                if alias is not parameter:
                    self._installed.append((module, name, parameter, alias))
        self.trained = [parameter for parameter in self._aliases if backward and parameter.requires_grad]

    def _alias(self, parameter: Tensor, j: int, name: str = "") -> Tensor:
        known = self._aliases.get(parameter, {}).get(j)
        if known is not None:
            return known
        trains = self._backward and parameter.requires_grad
        alias = self._make(parameter, j, name, trains=trains)
        if alias is None:
            return parameter
        self._parameters[alias] = parameter
        if vars(parameter):
            vars(alias).update(self._attributes(parameter, alias, j, name))
        if trains and self._watched:
            alias.register_post_accumulate_grad_hook(_refuse_outside)  # type: ignore[no-untyped-call]
        self._aliases.setdefault(parameter, {})[j] = alias
        self._in_column[j].append(alias)
        return alias

    def _attributes(self, parameter: Tensor, alias: Tensor, j: int, name: str) -> dict[str, Any]:
        """Return the attributes of the alias of a parameter: those of a frozen one lead to aliases in their turn."""
        if parameter.requires_grad:
            return vars(parameter)

        def there(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:  # Its gradient would not arrive.
                return tensor
            return self._values(alias) if has_memory_of(tensor, parameter) else self._alias(tensor, j, name)

        return attributes_with(parameter, there)

    def _values(self, alias: Tensor) -> Tensor:
        """Return a plain tensor with the memory of an alias."""
        return alias.detach()

    def _make(self, parameter: Tensor, j: int, name: str, *, trains: bool) -> Tensor | None:
        """Return a new alias; None if the parameter itself serves.

        Args:
            parameter: the parameter
            j: the column
            name: names the parameter, for errors; '' where the model uses it outside of its module
            trains: whether the alias gets a gradient
        """
        away = self._moves(parameter, self._devices[j])
        if not trains and not away:
            return None
        values = links.to(parameter.detach(), self._devices[j], copy=True) if away else parameter
        return parameter_like(parameter, values, requires_grad=trains)

    def _moves(self, tensor: Tensor, device: torch.device | None) -> bool:
        """Return whether a tensor must be copied to be used on a device."""
        if self._streams is None or device is None:
            return False
        home = self._streams.device_of(tensor)
        return home is not None and self._streams.moves(home, device)

    def at(self, tensor: Tensor, j: int) -> Tensor | None:
        """Return the alias in column ``j`` of a parameter, given it or an alias of it; None for others."""
        is_known = tensor in self._parameters or j in self._aliases.get(tensor, ())
        return self.make(tensor, j) if is_known else None

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return the parameter of an alias; else the tensor."""
        return self._parameters.get(tensor, tensor)

    def make(self, tensor: Tensor, j: int) -> Tensor:
        """Return the alias in column ``j`` of a parameter of the model, given it or an alias of it."""
        return self._alias(self.parameter_of(tensor), j)

    def verify_apart(self) -> None:
        """Check that the pass of the caller that this thread is in goes through no graph of a cell itself.

        Raises:
            RuntimeError: it begins at a tensor from the midst of the model as well, whose graph is freed by then.
        """
        trained = [alias for parameter in self.trained for alias in self._aliases[parameter].values()]
        if any(map(will_run, nodes_behind(trained))):
            raise differentiated_by_itself("the model")

    def used(self, leaves: Iterable[Tensor]) -> set[Tensor]:
        """Return the parameters that have one of these leaves as an alias."""
        return {self._parameters[leaf] for leaf in leaves if leaf in self._parameters}

    def all(self) -> list[Tensor]:
        """Return the aliases in all columns."""
        return [alias for aliases in self._in_column for alias in aliases]

    def of(self, j: int) -> list[Tensor]:
        """Return the aliases in a column."""
        return self._in_column[j]

    def verify_present(self, tensor: Tensor, j: int, user: str) -> None:
        """Check that a tensor has memory while column ``j`` is resident; here all do."""

    def verify_returned(self, tensors: Iterable[Leaf], where: str) -> None:
        """Check that no tensor that leaves a column is a weight that will be evicted; here none is."""

    def verify_unchanged(self, j: int) -> None:
        """Check that no parameter of a column has changed since its alias was made; here they share the memory."""

    @contextmanager
    def filled(self, j: int) -> Iterator[None]:
        """Let the gradients of a cell of column ``j`` arrive in a ``with`` block, in this thread."""
        # Around it, this thread may differentiate a cell of another pipeline.
        around, _differentiating.is_a_cell = _differentiating.is_a_cell, True
        try:
            with unshared(self._in_column[j]):
                yield
        finally:
            _differentiating.is_a_cell = around

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the modules have the aliases in a ``with`` block."""
        with self._lock.held(self._calls, alone=True):
            try:
                for module, name, parameter, alias in self._installed:
                    # The caller may have replaced the parameter between forward and backward.
                    if name in module._parameters and module._parameters[name] is parameter:
                        _assign(module, name, alias)
                yield
            finally:
                uninterrupted(self._remove)

    def _remove(self) -> None:
        for module, name, parameter, alias in self._installed:
            if name in module._parameters and module._parameters[name] is alias:
                self._keep_memory(parameter, alias)
                _assign(module, name, parameter)

    def _keep_memory(self, parameter: Tensor, alias: Tensor) -> None:
        """Let a parameter have the memory that a forward has given its alias, by an assignment to ``weight.data``."""
        if alias.requires_grad and alias.device == parameter.device and alias.data_ptr() != parameter.data_ptr():
            parameter.data = alias.data

    def take(self) -> list[Leaf]:
        """Return the gradients of the trained parameters, and leave none behind."""
        return [self._take(parameter) for parameter in self.trained]

    def take_of(self, j: int) -> Iterator[tuple[Tensor, Leaf]]:
        """Yield the trained parameters that no column before ``j`` has, with their gradients, and leave none.

        An earlier column may add to the aliases of a later one, too: what it recomputes finds those in the modules.
        """
        for parameter in self.trained:
            if min(self._aliases[parameter]) == j:
                yield parameter, self._take(parameter)

    def _take(self, parameter: Tensor) -> Leaf:
        aliases = self._aliases[parameter]
        if len(aliases) == 1:
            (alias,) = aliases.values()
            return self._take_from(alias, parameter)
        total = None
        for _, alias in sorted(aliases.items()):  # Columns are always added in this order.
            total = sum_of(total, self._take_from(alias, parameter))
        return total

    def _take_from(self, alias: Tensor, parameter: Tensor) -> Leaf:
        """Return the gradient of an alias where its parameter is, and leave none."""
        grad, alias.grad = alias.grad, None
        home = None if grad is None or self._streams is None else self._streams.device_of(parameter)
        if grad is None or home is None or not self._moves(grad, home):
            return grad
        return links.to(grad, home)


def weights_of(slots: Iterable[Slot]) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters in slots, and the tensors among the attributes of frozen ones, each with its column."""
    for module, name, j in slots:
        parameter = module._parameters[name]
        if parameter is not None and not is_lazy(parameter):
            yield from ((tensor, j) for tensor in with_attached([parameter]))


def _assign(module: nn.Module, name: str, parameter: Tensor) -> None:
    if isinstance(module, nn.RNNBase):
        setattr(module, name, parameter)  # It keeps another list of its parameters.
    else:
        module._parameters[name] = parameter  # type: ignore[assignment]
