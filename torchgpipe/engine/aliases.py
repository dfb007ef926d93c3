"""Aliases in the place of parameters while the cells of a program run.

An alias has the memory of a parameter and a ``.grad`` of its own, to which the cells of one partition add. A parameter
that several partitions share has an alias in each of them, so the order of the sum does not depend on the order of
threads. On another device the alias is a copy, made once for each mini-batch. If the weights live in host memory, an
alias has memory only while its partition is on its device, see `residence`.

A gradient that arrives while no cell is being differentiated would stay at the alias, unnoticed: a forward calls
backward(), or a hook has kept a tensor of a module, which the caller differentiates by itself. Where that can happen,
aliases are watched; and a pass of the caller that goes through aliases as well as through the output is always refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.torch_internals import memory_of, parameter_like, storage_key, versions, will_run
from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.function import nodes_behind
from torchgpipe.engine.gradients import sum_of
from torchgpipe.engine.graph import differentiated_by_itself
from torchgpipe.engine.host_memory import FrozenCopy, HostMemory, empty
from torchgpipe.engine.interrupts import uninterrupted
from torchgpipe.engine.resting import Resting
from torchgpipe.replay.found import registered

__all__ = ["Aliases", "Slot", "StepLock", "filling_aliases", "weights_of"]

#: A place of a parameter: the module, the name there, and the partition.
Slot = tuple[nn.Module, str, int]


class _Differentiating(threading.local):
    is_a_cell = False


#: Whether this thread differentiates a cell.
_differentiating = _Differentiating()


class filling_aliases:
    """Let gradients arrive at aliases in a ``with`` block, in this thread."""

    __slots__ = ()

    def __enter__(self) -> None:
        _differentiating.is_a_cell = True

    def __exit__(self, *_: object) -> None:
        _differentiating.is_a_cell = False


def _refuse_outside(alias: Tensor) -> None:
    if not _differentiating.is_a_cell:
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
        watched: whether gradients that do not come from a cell are refused
        host_memory: takes weights to devices, if they live in host memory

    Attributes:
        host_memory: takes weights to devices, if they live in host memory
        resting: what waits in host memory, if activations do
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
        watched: bool = False,
        host_memory: HostMemory | None = None,
    ) -> None:
        self._devices, self._streams = devices, streams
        self.host_memory = host_memory
        self.resting: Resting | None = None
        #: Of aliases without memory of their own, by the key of their storage: the partition, and a name for errors.
        places = self._places = dict[int, tuple[int, str]]()
        if host_memory is not None and host_memory.rests:
            # Not `self`: a cycle would keep the model alive.
            self.resting = Resting(host_memory, lambda tensor: storage_key(tensor) in places)
        #: Aliases that keep their memory.
        self._kept: dict[Tensor, FrozenCopy] = {}
        #: What has come down of the gradient of an alias.
        self._came_down: dict[Tensor, Tensor] = {}
        #: What a parameter in host memory was when it first went up: its version, and its memory.
        self._seen: dict[Tensor, tuple[int, int]] = {}
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
                alias = self._alias(parameter, j, f"'{name}' of a {type(module).__name__}")
                if alias is not parameter:
                    self._installed.append((module, name, parameter, alias))
        self.trained = list(self._of_trained)

    def _alias(self, parameter: Tensor, j: int, name: str = "") -> Tensor:
        key = (id(parameter), j)
        known = self._by_partition.get(key)
        if known is not None:
            return known
        trains = self._backward and parameter.requires_grad
        away = self._moves(parameter, self._devices[j])
        if not trains and not away and self.host_memory is None:
            return parameter
        if self.host_memory is not None:
            values, kept = self.host_memory.alias(parameter, self._devices[j], j)
        else:
            values = parameter.detach().to(self._devices[j], copy=True) if away else parameter
        alias = parameter_like(parameter, values, requires_grad=trains)
        self._parameters[alias] = parameter
        if self.host_memory is not None:
            if kept is not None:
                self._kept[alias] = kept
            if not name:  # The model uses it outside of its module, while partition j is on its device.
                self._fill(alias, j)
                name = self._places[self._key_of(parameter)][1]
            self._places[storage_key(alias)] = j, name
        if vars(parameter):
            vars(alias).update(vars(parameter))
        if trains and self._watched:
            alias.register_post_accumulate_grad_hook(_refuse_outside)  # type: ignore[no-untyped-call]
        self._by_partition[key] = alias
        self._in_partition[j].append(alias)
        if trains:
            self._of_trained.setdefault(parameter, {})[j] = alias
        return alias

    def _moves(self, tensor: Tensor, device: torch.device | None) -> bool:
        """Return whether a tensor must be copied to be used on a device."""
        if self._streams is None or device is None:
            return False
        home = self._streams.device_of(tensor)
        return home is not None and self._streams.moves(home, device)

    def at(self, tensor: Tensor, j: int) -> Tensor | None:
        """Return the alias in partition ``j`` of a parameter, given it or an alias of it; None for others."""
        is_known = tensor in self._parameters or (id(tensor), j) in self._by_partition
        return self.make(tensor, j) if is_known else None

    def make(self, tensor: Tensor, j: int) -> Tensor:
        """Return the alias in partition ``j`` of a parameter of the model, given it or an alias of it."""
        return self._alias(self._parameters.get(tensor, tensor), j)

    def verify_apart(self) -> None:
        """Check that the pass of the caller that this thread is in goes through no graph of a cell itself.

        Raises:
            RuntimeError: it begins at a tensor from the midst of the model as well, whose graph is freed by then.
        """
        trained = [alias for aliases in self._of_trained.values() for alias in aliases.values()]
        if any(map(will_run, nodes_behind(trained))):
            raise differentiated_by_itself("the model")

    def used(self, leaves: Iterable[Tensor]) -> set[Tensor]:
        """Return the parameters that have one of these leaves as an alias."""
        return {self._parameters[leaf] for leaf in leaves if leaf in self._parameters}

    def all(self) -> list[Tensor]:
        """Return the aliases in all partitions."""
        return [alias for aliases in self._in_partition for alias in aliases]

    def of(self, j: int) -> list[Tensor]:
        """Return the aliases in a partition."""
        return self._in_partition[j]

    # ------------------------------------------------------------------------------------------------- host memory

    def fill(self, j: int) -> None:
        """Give the aliases of a partition memory and values, on the current stream.

        Raises:
            RuntimeError: a parameter has changed since its alias was last filled.
        """
        assert self.host_memory is not None
        self.verify_unchanged(j)
        for alias in self.of(j):
            self._fill(alias, j)

    def _fill(self, alias: Tensor, j: int) -> None:
        assert self.host_memory is not None
        self.host_memory.fill(alias, self._parameters[alias], self._devices[j], self._kept.get(alias))

    def verify_unchanged(self, j: int) -> None:
        """Check that the parameters of a partition are what they were when they first went up.

        Raises:
            RuntimeError: one has been changed in place, or has other memory.
        """
        for alias in self.of(j):
            parameter = self._parameters[alias]
            now = versions([parameter])[0], parameter.data_ptr()
            if self._seen.setdefault(parameter, now) != now:
                raise RuntimeError(
                    f"{self._places[storage_key(alias)][1]} was changed between forward and backward, which would "
                    "compute with other values; call backward() before optimizer.step()"
                )

    def verify_untouched(self, j: int) -> None:
        """Check that the model has not changed the aliases of a partition.

        Raises:
            RuntimeError: it has changed one in place, and the change would be lost.
        """
        aliases = self.of(j)
        if any(versions(aliases)):
            for alias in aliases:
                if versions([alias]) != [0]:
                    self.refuse_changed(alias)

    def empty(self, j: int) -> int:
        """Take the memory of the aliases of a partition, on the current stream, and return the bytes."""
        return sum([empty(alias) for alias in self.of(j) if alias not in self._kept])

    def bring_down(self, j: int, stream: Stream) -> None:
        """Take the gradients of a partition from its aliases to host memory, on a stream, which is the current one."""
        assert self.host_memory is not None
        for alias in self.of(j):
            grad, alias.grad = alias.grad, None
            if grad is not None:
                grad = self.host_memory.bring_down(grad, stream)
                before = self._came_down.get(alias)
                if before is not None:
                    stream.synchronize()
                self._came_down[alias] = grad if before is None else sum_of(before, grad)  # type: ignore[assignment]

    def column_of(self, tensor: Tensor) -> int | None:
        """Return the partition of an alias, or of a view of it; None for other tensors."""
        return self._places.get(storage_key(tensor), (None, ""))[0]

    def verify_present(self, tensor: Tensor, j: int, user: str) -> None:
        """Check that a tensor has no memory that is there only while another partition is.

        Raises:
            RuntimeError: it is a weight of another partition, or a view of one, or it rests.
        """
        place = self._places.get(storage_key(tensor))
        if place is None and tensor.numel() and not memory_of(tensor).nbytes():
            raise RuntimeError(
                f"{user} in partition {j} uses a tensor of shape {tuple(tensor.shape)} of another micro-batch, which "
                "waits in host memory for its turn; pass on a copy (x.clone()), or give offload='weights'"
            )
        if place is not None and place[0] != j:
            raise RuntimeError(
                f"{user} in partition {j} uses the weight {place[1]} in partition {place[0]}, or a view of it, which "
                "is not on the device then; pass on a copy (weight.clone()), give a balance that keeps both in one "
                "partition, or leave out offload"
            )

    def verify_returned(self, tensors: Iterable[Leaf], where: str) -> None:
        """Check that no tensor that leaves a partition is a weight.

        Raises:
            RuntimeError: one is a weight, or a view of it, whose memory leaves the device.
        """
        for tensor in tensors:
            place = None if tensor is None else self._places.get(storage_key(tensor))
            if place is not None:
                raise RuntimeError(
                    f"{where} returns the weight {place[1]}, or a view of it, whose memory leaves the device under "
                    "offload; return a copy (weight.clone())"
                )

    def refuse_changed(self, tensor: Tensor) -> None:
        """Refuse that the model changes a tensor, if that is a weight.

        Raises:
            RuntimeError: it is a weight.
        """
        place = self._places.get(storage_key(tensor))
        if place is not None:
            assert self.host_memory is not None
            self.host_memory.forget_frozen()
            raise RuntimeError(
                f"the forward changes the weight {place[1]} in place, but under offload it is a copy on the device, "
                "and the change would be lost; change parameters between two calls, such as after optimizer.step()"
            )

    def _key_of(self, parameter: Tensor) -> int:
        """Return the key of the storage of any alias of a parameter."""
        known = list(self._parameters.items())  # In one call: the workers of other devices add to it.
        return next(storage_key(alias) for alias, owner in known if owner is parameter)

    # --------------------------------------------------------------------------------------------------------------

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
        if len(aliases) == 1 and self._streams is None and self.host_memory is None:
            (alias,) = aliases.values()
            total, alias.grad = alias.grad, None
            return total
        total = None
        home = None if self._streams is None else self._streams.device_of(parameter)
        for _, alias in sorted(aliases.items()):  # Partitions are always added in this order.
            total = sum_of(total, self._came_down.pop(alias, None))
            grad, alias.grad = alias.grad, None
            if grad is not None:
                total = sum_of(total, grad.to(home) if self._moves(grad, home) else grad)
        return total


def weights_of(slots: Iterable[Slot]) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters in slots, each with its partition."""
    for module, name, j in slots:
        parameter = module._parameters[name]
        if parameter is not None and not is_lazy(parameter):
            yield parameter, j


def _assign(module: nn.Module, name: str, parameter: Tensor) -> None:
    if isinstance(module, nn.RNNBase):
        setattr(module, name, parameter)  # It keeps another list of its parameters.
    else:
        module._parameters[name] = parameter  # type: ignore[assignment]
