"""Aliases in the place of parameters while the cells of a program run, and the way of their gradients into ``.grad``.

An alias has the memory of a parameter and a ``.grad`` of its own, to which the cells of one partition add. At the end,
the sum goes to the parameter, as the gradient of one plain layer would: hooks hear it once, and so does
DistributedDataParallel. A parameter that several partitions share has an alias in each of them, so the order of the sum
does not depend on the order of threads. On another device the alias is a copy, made once for each mini-batch.

A tensor that a layer or the loss function has captured gets its gradient directly. If that is a parameter, its
``.grad`` from before a step is set aside meanwhile, so that a step that fails can put it back (`Delivery`).

A gradient that arrives while no cell is being differentiated would stay at the alias, unnoticed: a forward calls
backward(), or a hook has kept a tensor of a module, which the caller differentiates by itself. Where that can happen,
aliases are watched.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import gradient_hooks
from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.cut import differentiated_by_itself
from torchgpipe.engine.function import accumulate
from torchgpipe.engine.gradients import refusal, sum_of
from torchgpipe.engine.hooks import has_hooks
from torchgpipe.engine.interrupts import uninterrupted
from torchgpipe.replay.found import registered

__all__ = ["Aliases", "Delivery", "Slot", "StepLock", "filling_aliases"]

#: A place of a parameter: the module, the name there, and the partition.
Slot = tuple[nn.Module, str, int]


class _Pass(threading.local):
    is_a_cell = False


#: Whether this thread differentiates a cell.
_pass = _Pass()


class filling_aliases:
    """Let gradients arrive at aliases in a ``with`` block, in this thread."""

    __slots__ = ()

    def __enter__(self) -> None:
        _pass.is_a_cell = True

    def __exit__(self, *_: object) -> None:
        _pass.is_a_cell = False


def _refuse_outside(alias: Tensor) -> None:
    if not _pass.is_a_cell:
        raise differentiated_by_itself("the model")


class StepLock:
    """A lock that its owner can be copied and pickled with: the copy has another one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return StepLock, ()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Aliases:
    """The aliases of the parameters of a model during a mini-batch.

    Args:
        slots: where parameters are
        devices: the device of each partition
        streams: tells what must be copied; None if all parameters are on the devices of their partitions
        lock: held while the modules have the aliases, which other threads must not meet
        backward: whether gradients are wanted
        watched: the partitions in which gradients that do not come from a cell are refused

    Attributes:
        trained: the parameters that have aliases with gradients, each once
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        devices: Sequence[torch.device],
        streams: Streams | None,
        lock: AbstractContextManager[Any],
        *,
        backward: bool,
        watched: Container[int] = (),
    ) -> None:
        self._devices, self._streams = devices, streams
        self._backward, self._watched = backward, watched
        self._lock = lock
        #: By the id of a parameter, and the partition.
        self._by_partition: dict[tuple[int, int], Tensor] = {}
        #: The parameter of each alias.
        self._parameters: dict[Tensor, Tensor] = {}
        #: The aliases of each trained parameter, by partition.
        self._of_trained: dict[Tensor, dict[int, Tensor]] = {}
        self._in_partition: list[list[Tensor]] = [[] for _ in devices]
        self._installed: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module, name, j in slots:
            parameter = module._parameters[name]
            if parameter is not None and not is_lazy(parameter):
                alias = self._alias(parameter, j)
                if alias is not parameter:
                    self._installed.append((module, name, parameter, alias))
        self.trained = list(self._of_trained)

    def _alias(self, parameter: Tensor, j: int) -> Tensor:
        key = (id(parameter), j)
        known = self._by_partition.get(key)
        if known is not None:
            return known
        trains = self._backward and parameter.requires_grad
        away = self._moves(parameter, self._devices[j])
        if not trains and not away:
            return parameter
        values = parameter.detach().to(self._devices[j], copy=True) if away else parameter
        alias = nn.Parameter(values, requires_grad=trains)  # It has the memory of the values, and no history.
        if vars(parameter):
            vars(alias).update(vars(parameter))
        if trains and j in self._watched:
            alias.register_post_accumulate_grad_hook(_refuse_outside)  # type: ignore[no-untyped-call]
        self._by_partition[key] = alias
        self._parameters[alias] = parameter
        self._in_partition[j].append(alias)
        if trains:
            self._of_trained.setdefault(parameter, {})[j] = alias
        return alias

    def _moves(self, tensor: Tensor, device: torch.device | None) -> bool:
        """Return whether a tensor must be copied to be used on a device."""
        if self._streams is None or device is None:
            return False
        there = self._streams.device_of(tensor)
        return there is not None and self._streams.moves(there, device)

    def at(self, tensor: Tensor, j: int) -> Tensor | None:
        """Return the alias in partition ``j`` of a parameter, given it or an alias of it; None for others."""
        parameter = self._parameters.get(tensor)
        if parameter is None:
            if (id(tensor), j) not in self._by_partition:
                return None
            parameter = tensor
        return self._alias(parameter, j)

    def used(self, leaves: Iterable[Tensor]) -> set[Tensor]:
        """Return the parameters that have one of these leaves as an alias."""
        return {self._parameters[leaf] for leaf in leaves if leaf in self._parameters}

    def of(self, j: int) -> list[Tensor]:
        """Return the aliases in a partition."""
        return self._in_partition[j]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the modules have the aliases in a ``with`` block."""
        with self._lock:
            try:
                for module, name, parameter, alias in self._installed:
                    # The caller may have replaced the parameter between forward and backward.
                    if registered(module._parameters, name) is parameter:
                        _assign(module, name, alias)
                yield
            finally:
                uninterrupted(self._remove)

    def _remove(self) -> None:
        for module, name, parameter, alias in self._installed:
            if registered(module._parameters, name) is alias:
                _assign(module, name, parameter)

    def take(self) -> list[Leaf]:
        """Return the gradients of the trained parameters, and leave none behind."""
        return [self._take(parameter) for parameter in self.trained]

    def take_of(self, j: int) -> Iterator[tuple[Tensor, Leaf]]:
        """Yield the trained parameters that no partition before ``j`` has, with their gradients, and leave none.

        An earlier partition may add to the aliases of a later one, too: what it recomputes finds those in the modules.
        """
        for parameter in self.trained:
            if min(self._of_trained[parameter]) == j:
                yield parameter, self._take(parameter)

    def _take(self, parameter: Tensor) -> Leaf:
        aliases = self._of_trained[parameter]
        if len(aliases) == 1 and self._streams is None:
            (alias,) = aliases.values()
            total, alias.grad = alias.grad, None
            return total
        total = None
        own = None if self._streams is None else self._streams.device_of(parameter)
        for _, alias in sorted(aliases.items()):  # Partitions are always added in this order.
            grad, alias.grad = alias.grad, None
            if grad is not None:
                total = sum_of(total, grad.to(own) if self._moves(grad, own) else grad)
        return total


class Delivery:
    """The way of gradients into ``.grad`` at the end of a step: either all of them arrive, or none.

    What was in ``.grad`` before is set aside. An optimizer that steps in a hook is not undone.

    Args:
        parameters: the parameters
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before: list[Leaf] = [parameter.grad for parameter in parameters]
        #: The numbers of the parameters with hooks, or with a graph of their own.
        self._heard = [k for k, one in enumerate(parameters) if _listens(one)]
        #: Gradients that hooks have seen added to in place, each with a copy.
        self._copies: list[tuple[Tensor, Tensor]] = []
        for parameter, before in zip(parameters, self._before):
            if before is not None:
                parameter.grad = None
        self._guards = [_guard(parameters[k]) for k in self._heard]

    def let_hooks_hear(self, sums: Sequence[Leaf]) -> None:
        """Let sums arrive at parameters with hooks as the gradients of one backward pass do."""
        self._unguard()
        heard = [(self._parameters[k], sums[k]) for k in self._heard]
        for k in self._heard:
            before = self._before[k]
            self._parameters[k].grad = before
            if before is not None and sums[k] is not None:
                self._copies.append((before, before.detach().clone()))
        pairs = [(get_gradient_edge(parameter), total) for parameter, total in heard if total is not None]
        if pairs:
            edges, totals = zip(*pairs)
            accumulate(edges, totals, keep_graph=False)

    @torch.no_grad()
    def end(self, sums: Sequence[Leaf]) -> None:
        """Add the sums of all other parameters to what was set aside; the last thing that may not fail."""
        heard = set(self._heard)
        for k, (parameter, before, total) in enumerate(zip(self._parameters, self._before, sums)):
            if k in heard:
                continue
            direct = parameter.grad  # of a parameter that a layer has captured
            if direct is not None:
                total = sum_of(direct, total)
            if before is None:
                parameter.grad = total
            elif total is not None and before.layout is torch.strided:
                parameter.grad = before.add_(total)
            else:
                parameter.grad = sum_of(before, total)

    def undo(self) -> None:
        """Put everything back that was there at the beginning."""
        self._unguard()
        for parameter, before in zip(self._parameters, self._before):
            parameter.grad = before
        for before, copied in self._copies:
            before.detach().copy_(copied)

    def _unguard(self) -> None:
        for handle in self._guards:
            handle.remove()


def _listens(parameter: Tensor) -> bool:
    return not parameter.is_leaf or has_hooks(parameter, get_gradient_edge(parameter).node)


def _guard(parameter: Tensor) -> Any:
    """Refuse gradients that do not come from an alias, of which the hooks of a parameter would hear each part."""

    def refuse(_: Tensor) -> None:
        raise refusal(parameter)

    handle: Any = parameter.register_hook(refuse)  # type: ignore[no-untyped-call]
    hooks: Any = gradient_hooks(parameter)
    hooks.move_to_end(handle.id, last=False)
    return handle


def _assign(module: nn.Module, name: str, parameter: Tensor) -> None:
    if isinstance(module, nn.RNNBase):
        setattr(module, name, parameter)  # It keeps another list of its parameters.
    else:
        module._parameters[name] = parameter  # type: ignore[assignment]
