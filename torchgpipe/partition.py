"""From a Sequential, a balance and devices to partitions in their places: everything that is checked and done once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from torchgpipe.device import same_memory

__all__ = [
    "Partition",
    "layers_of",
    "place",
    "split",
    "verify_balance",
    "verify_divided",
    "verify_module",
    "verify_names",
    "verify_sharing",
]


class Partition(nn.Sequential):
    """Consecutive layers of a pipeline: a view on layers that the pipeline owns.

    Hooks and ``compile()`` work on it as on any module. The layers themselves are registered on the pipeline,
    under the names of the wrapped model, and are replaced there.
    """

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        layers = iter(self)
        # Only the first layer can have several arguments: a layer returns one value.
        value = next(layers)(*inputs, **keywords)
        for layer in layers:
            value = layer(value)
        return value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles these layers, as on any module; the other partitions are compiled by themselves or not at all."""
        # The compiler counts its recompilations by code, and gives up after some. So each partition has its own: all
        # of them together would run out of tries, and be left half compiled.
        code = type(self).forward.__code__.replace(co_name=f"forward_of_{'_'.join(self._modules).replace('.', '_')}")
        vars(self)["forward"] = MethodType(FunctionType(code, globals(), "forward"), self)
        super().compile(*args, **kwargs)

    def follow(self, layers: Mapping[str, nn.Module], training: bool) -> None:
        """Takes over the layers that the owner has by now under the same names, and its mode."""
        self.training = training
        for name in self._modules:
            self._modules[name] = layers[name]

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if name in self._modules:
            raise TypeError(
                f"a partition is a view on the layers of its pipeline; to replace layer '{name}', set it on the "
                f"pipeline: model.set_submodule('{name}', layer)"
            )
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in self.__dict__.get("_modules", ()):
            self.add_module(name, value)
        super().__setattr__(name, value)


def verify_module(module: nn.Module) -> None:
    """Raises if ``module`` cannot be partitioned at all.

    Raises:
        TypeError: it is not an :class:`~torch.nn.Sequential`.
        ValueError: a layer occurs twice.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, but got {type(module).__name__}")
    names: dict[int, str] = {}
    for name, layer in module._modules.items():
        first = names.setdefault(id(layer), name)
        if first != name:
            raise ValueError(
                f"module with duplicate children is not supported, but '{first}' and '{name}' are the same "
                "layer; make a copy of it, or put both uses into one layer"
            )


def verify_names(pipeline: nn.Module, module: nn.Sequential) -> None:
    """Raises if a layer has a name that the pipeline, or the partition that it will be in, needs for itself.

    Args:
        pipeline: with all of its own attributes, and without layers
        module: the layers

    Raises:
        ValueError: the same, with the names.
    """
    needed = {*dir(pipeline), *dir(Partition)}
    taken = [name for name in module._modules if name in needed]
    if taken:
        raise ValueError(
            f"layers cannot have the names of attributes of {type(pipeline).__name__}, but there are {taken}; rename "
            "them in the Sequential, for instance by adding an underscore"
        )


def verify_balance(balance: Iterable[int] | None, layers: int) -> list[int]:
    """The balance as a list, once it fits a module with that many layers.

    Raises:
        TypeError: it is something else than integers in a list or the like.
        ValueError: it is missing, has another sum than ``layers``, or leaves a partition empty.
    """
    if balance is None:
        raise ValueError(_recommend_balancing(f"balance is required (module: {layers} layers)"))
    try:
        counts = [operator.index(count) for count in balance]
    except TypeError:
        raise TypeError(
            _recommend_balancing(
                f"balance takes a list of integers, the number of layers in each partition, but got {balance!r} "
                f"(module: {layers} layers)"
            )
        ) from None
    if any(count <= 0 for count in counts):
        raise ValueError(
            _recommend_balancing(f"all balance numbers must be positive integers (balance: {counts}, layers: {layers})")
        )
    if sum(counts) != layers:
        raise ValueError(
            _recommend_balancing(
                f"module and sum of balance have different length (module: {layers}, sum of balance: {sum(counts)})"
            )
        )
    return counts


def _recommend_balancing(message: str) -> str:
    return f"""{message}

Let the balance be measured, here for 4 partitions:

    from torchgpipe_balancing import balance_by_time
    balance = balance_by_time(module, sample, partitions=4)

(or by size; see torchgpipe_balancing, or torchgpipe.balance for the signatures of later releases)"""


def verify_divided(layers: Iterable[str], partitions: Sequence[Partition]) -> None:
    """Raises if some of the layers are in no partition, and would not run, or the other way round.

    Raises:
        RuntimeError: layers were added or deleted since they were divided.
    """
    divided = dict.fromkeys([name for partition in partitions for name in partition._modules])
    now = dict.fromkeys(layers)
    if now.keys() != divided.keys():
        added, deleted = list(now.keys() - divided.keys()), list(divided.keys() - now.keys())
        raise RuntimeError(
            "the balance of a pipeline is made for the layers that it had, but since then "
            + " and ".join(
                f"{sorted(names)} {'was' if len(names) == 1 else 'were'} {what}"
                for names, what in [(added, "added"), (deleted, "deleted")]
                if names
            )
            + "; put nn.Identity() in the place of a layer instead of deleting it, keep other modules outside, or "
            "wrap the layers again: GPipe(model.unwrap(), ...)"
        )


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a Sequential, or of the pipeline around one, by name."""
    layers: dict[str, Any] = module._modules
    return layers


def split(
    layers: Mapping[str, nn.Module], balance: Sequence[int], kind: type[Partition] = Partition
) -> list[Partition]:
    """Views on consecutive layers, ``balance[j]`` of them in partition j."""
    rest = iter(layers.items())
    partitions = []
    for count in balance:
        partition = kind()
        # Not by `add_module`, which takes no name of a layer inside of another module, such as '0.1'.
        partition._modules.update(islice(rest, count))
        partitions.append(partition)
    return partitions


def place(partitions: Sequence[Partition], devices: Sequence[torch.device]) -> None:
    """Moves every partition to its device; parameters on the meta device come into being there.

    Raises:
        ValueError: a parameter would have to be on two devices, or a layer on the meta device cannot
            initialise itself.
    """
    verify_sharing(partitions, devices)
    on_meta = _verify_meta(partitions)
    for partition, device in zip(partitions, devices):
        _materialise(partition, device)
        for module in _children_first(partition):
            if module in on_meta:
                on_meta[module]()
        if not all(same_memory(tensor.device, device) for tensor in _tensors(partition)):
            partition.to(device)


def verify_sharing(partitions: Sequence[Partition], places: Sequence[object]) -> None:
    """Raises if a parameter would have to be in two places: on two devices, or in two processes.

    Raises:
        ValueError: the same, with the names.
    """
    owners: dict[torch.Tensor, tuple[str, object]] = {}
    shared = []
    for j, (partition, place) in enumerate(zip(partitions, places)):
        for name, parameter in partition.named_parameters():
            here = f"'{name}' (partition {j} on {place})"
            first, its_place = owners.setdefault(parameter, (here, place))
            if its_place != place:
                shared.append(f"{first} is also {here}")
    if shared:
        raise ValueError(
            f"module with duplicate parameters in distinct children is not supported: {'; '.join(shared)}; a "
            "parameter lives on one device, so choose a balance or devices that keep its layers together"
        )


def _verify_meta(partitions: Sequence[Partition]) -> dict[nn.Module, Callable[[], None]]:
    """The modules that hold tensors on the meta device, each with what initialises it."""
    known: set[torch.Tensor] = set()
    result = {}
    for partition in partitions:
        for name, module in partition.named_modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            on_meta = [tensor for tensor in own if tensor is not None and tensor.is_meta]
            if not on_meta:
                continue
            initialise = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if initialise is None or not known.isdisjoint(on_meta):
                reason = "has no reset_parameters() to initialise itself with" if initialise is None else "is shared"
                raise ValueError(
                    f"'{name}' ({type(module).__name__}) is on the meta device and {reason}; materialise the "
                    "module and load its weights before wrapping it"
                )
            known.update(on_meta)
            result[module] = initialise
    return result


def _materialise(partition: Partition, device: torch.device) -> None:
    """Gives memory to what is on the meta device, and to nothing else."""
    for module in partition.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _tensors(partition: Partition) -> Iterator[torch.Tensor]:
    yield from partition.parameters()
    yield from partition.buffers()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The order in which constructors initialise modules."""
    for child in module.children():
        yield from _children_first(child)
    yield module
