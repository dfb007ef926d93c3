"""From a Sequential, a balance and devices to partitions in their places: everything that is checked and done once."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from torchgpipe.devices.device import default_devices, same_memory

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
        # All partitions share the code of forward. Counted together, they would exceed the limit of eight graphs.
        kwargs.setdefault("isolate_recompiles", True)
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
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, but got {type(module).__name__}; write it as its layers "
            f"in the order of forward, for instance {_as_sequential(module)}, where what forward does between them is "
            'a layer as well (see "A model that is not sequential" in docs/recipes.rst)'
        )
    names: dict[int, str] = {}
    for name, layer in module._modules.items():
        first = names.setdefault(id(layer), name)
        if first != name:
            raise ValueError(
                f"module with duplicate children is not supported, but '{first}' and '{name}' are the same "
                "layer; make a copy of it, or put both uses into one layer"
            )


def _as_sequential(module: object) -> str:
    """The layers of ``module`` as one would write them in a Sequential."""
    if isinstance(module, nn.ModuleList):
        return "nn.Sequential(*model)"
    children = list(module.named_children()) if isinstance(module, nn.Module) else []
    stars = ["*" if isinstance(child, nn.Sequential | nn.ModuleList) else "" for _, child in children]
    layers = [f"{star}model.{name}" for star, (name, _) in zip(stars, children)]
    if len(layers) > 4:
        layers[2:-1] = ["..."]
    return f"nn.Sequential({', '.join(layers) or 'first, second, ...'})"


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
        raise ValueError(_recommend_balancing(f"balance is required (module: {layers} layers)", layers))
    try:
        counts = [operator.index(count) for count in balance]
    except TypeError:
        raise TypeError(
            _recommend_balancing(
                f"balance takes a list of integers, the number of layers in each partition, but got {balance!r} "
                f"(module: {layers} layers)",
                layers,
            )
        ) from None
    if any(count <= 0 for count in counts):
        raise ValueError(
            _recommend_balancing(
                f"all balance numbers must be positive integers (balance: {counts}, layers: {layers})",
                layers,
                len(counts),
            )
        )
    if sum(counts) != layers:
        raise ValueError(
            _recommend_balancing(
                f"module and sum of balance have different length (module: {layers}, sum of balance: {sum(counts)})",
                layers,
                len(counts),
            )
        )
    return counts


def _recommend_balancing(message: str, layers: int, wanted: int = 0) -> str:
    """Return ``message`` and how to get a balance.

    Args:
        message: what is wrong with the one that was given
        layers: the number of layers of the module
        wanted: the number of partitions that the caller has in mind; 0 for one on each accelerator
    """
    partitions = max(1, min(layers, wanted or max(2, len(default_devices(2)))))
    return f"""{message}

Let the balance be measured, here for {partitions} partition{"s" * (partitions > 1)}:

    from torchgpipe_balancing import balance_by_time
    balance = balance_by_time(module, sample, partitions={partitions})

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
    """The modules that hold tensors on the meta device, each with what initialises it.

    Raises:
        ValueError: one has nothing to initialise itself with, or a parameter that cannot come into being.
    """
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
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and weakref.getweakrefs(parameter):
                    raise _cannot_come_into_being(f"{name}.{attribute}", "there is a weak reference to it")
            known.update(on_meta)
            result[module] = initialise
    return result


def _materialise(partition: Partition, device: torch.device) -> None:
    """Gives memory to what is on the meta device, and to nothing else.

    A parameter stays the same object: an optimizer that was made before has it, and trains it.
    """
    for name, module in partition.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                try:
                    _bring_into_being(parameter, device)
                except RuntimeError as error:
                    raise _cannot_come_into_being(f"{name}.{attribute}", str(error)) from error
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = torch.empty_like(buffer, device=device)


def _bring_into_being(parameter: nn.Parameter, device: torch.device) -> None:
    """Gives a parameter memory on ``device``; its class, attributes and hooks stay.

    Raises:
        RuntimeError: something else holds its memory, or a weak reference to it.
    """
    real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    # All that is exchanged has to be on both sides, or it would stay behind with the memory that is dropped.
    real.__class__ = type(parameter)
    vars(real).update(vars(parameter))
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
    # The hooks are called by the memory, and known by the parameter: assigning them tells the new memory of them.
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, after


def _cannot_come_into_being(name: str, reason: str) -> ValueError:
    return ValueError(
        f"parameter '{name}' is on the meta device and cannot be given memory as the same object: {reason}; wrap the "
        "module before what refers to its parameters is made (an optimizer may be made before), or materialise the "
        "module and load its weights before wrapping it"
    )


def _tensors(partition: Partition) -> Iterator[torch.Tensor]:
    yield from partition.parameters()
    yield from partition.buffers()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The order in which constructors initialise modules."""
    for child in module.children():
        yield from _children_first(child)
    yield module
