"""Check a module, the names of its layers, the balance and the devices, before the module is split into partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchgpipe.devices.device import accelerators, canonical_device, default_devices
from torchgpipe.devices.torch_internals import is_optimized, uses_cuda_graphs
from torchgpipe.devices.typing import Device
from torchgpipe.model.partition import Partition
from torchgpipe.model.settings import CheckpointMode, verify_number

__all__ = [
    "verify_balance",
    "verify_devices",
    "verify_divided",
    "verify_initialised",
    "verify_layer_names",
    "verify_module",
    "verify_threads",
]


def verify_module(module: nn.Module) -> None:
    """Raise an error if ``module`` cannot be partitioned.

    Raises:
        TypeError: ``module`` is not a :class:`~torch.nn.Sequential`.
        ValueError: a layer occurs twice.
    """
    if not isinstance(module, nn.Sequential):
        remedy = (
            "torchgpipe.pipelined(module, sample, chunks=...) takes a module of any class, and nn.Sequential(*layers) "
            "makes one of a list of layers"
        )
        if hasattr(module, "unwrap"):
            remedy = "it is a pipeline already: unwrap() gives its layers back"
        elif is_optimized(module):
            remedy = "it is compiled as a whole: wrap the plain layers, and call model.compile() afterwards"
        kind = type(module).__name__
        raise TypeError(f"module must be nn.Sequential to be partitioned, but got {kind}; {remedy}")
    names: dict[int, str] = {}
    for name, layer in module._modules.items():
        first = names.setdefault(id(layer), name)
        if first != name:
            raise ValueError(
                f"module with duplicate children is not supported, but '{first}' and '{name}' are the same "
                "layer; make a copy of it, or put both uses into one layer"
            )


def verify_layer_names(pipeline: nn.Module, module: nn.Sequential) -> None:
    """Raise an error if the name of a layer is an attribute of the pipeline or of a partition.

    Args:
        pipeline: a pipeline with all of its own attributes, and without layers
        module: the layers

    Raises:
        ValueError: the names of these layers.
    """
    needed = {*dir(pipeline), *dir(Partition)}
    taken = [name for name in module._modules if name in needed]
    if taken:
        raise ValueError(
            f"layers cannot have the names of attributes of {type(pipeline).__name__}, but there are {taken}; rename "
            "them in the Sequential, for instance by adding an underscore"
        )


def verify_balance(balance: Iterable[int] | None, layers: int) -> list[int]:
    """Return the balance as a list, if it fits a module with that many layers.

    Raises:
        TypeError: ``balance`` is not an iterable of integers.
        ValueError: ``balance`` is missing, does not add up to ``layers``, or has an empty partition.
    """
    error: type[Exception] = ValueError
    counts, fault = list[int](), f"balance is required (module: {layers} layers)" if balance is None else ""
    try:
        counts = [verify_number("balance", count) for count in (() if balance is None else balance)]
    except TypeError:
        error, fault = TypeError, "balance takes a list of integers, the number of layers in each partition, but got "
        fault += f"{balance!r} (module: {layers} layers)"
    if any([count <= 0 for count in counts]):
        fault = f"all balance numbers must be positive integers (balance: {counts}, layers: {layers})"
    elif not fault and sum(counts) != layers:
        fault = f"module and sum of balance have different length (module: {layers}, sum of balance: {sum(counts)})"
    if fault:
        raise error(_recommend_balancing(fault, layers, len(counts)))
    return counts


def _recommend_balancing(message: str, layers: int, wanted: int = 0) -> str:
    """Return ``message``, followed by code that measures a balance.

    Args:
        message: what is wrong with the given balance
        layers: the number of layers of the module
        wanted: the number of partitions to recommend; 0 for one per accelerator
    """
    partitions = max(1, min(layers, wanted or max(2, len(accelerators()))))
    return f"""{message}

Let the balance be measured, here for {partitions} partition{"s" * (partitions > 1)}:

    from torchgpipe_balancing import balance_by_time
    balance = balance_by_time(module, sample, partitions={partitions})

(balance_by_size for memory; torchgpipe.plan(module, sample, batch=...) decides on chunks and schedule, too)"""


def verify_divided(layers: Iterable[str], partitions: Sequence[Partition]) -> None:
    """Raise an error if a layer is in no partition, so that it would not run, or if a partition has a deleted layer.

    Raises:
        RuntimeError: layers were added or deleted since the model was split.
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


def verify_devices(devices: Iterable[Device] | None, n: int) -> list[torch.device]:
    """Return the devices of ``n`` partitions.

    Args:
        devices: the device of each partition; None for those of the machine
        n: the number of partitions

    Raises:
        TypeError: ``devices`` is a single device.
        IndexError: there are fewer devices than partitions.
        ValueError: one of the devices is the meta device, or is not there.
    """
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(
            f"devices must be a list with a device for each partition, but got {devices!r}; to have all partitions "
            f"there, give devices=[{devices!r}] * {n}"
        )
    known = default_devices(n) if devices is None else [canonical_device(device) for device in islice(devices, n)]
    if len(known) < n:
        there = known or accelerators() or [torch.device("cpu")]
        shared = [str(there[j * len(there) // n]) for j in range(n)]
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(known)}, partitions: {n}); let neighbours share "
            f"one: devices={shared}, or take a balance with fewer partitions"
        )
    on_meta = [f"devices[{j}]" for j, device in enumerate(known) if device.type == "meta"]
    if on_meta:
        raise ValueError(
            f"nothing can be computed on the meta device, which {', '.join(on_meta)} is; a model may be made there, "
            "but devices are those that it is to run on, such as 'cuda:0' or 'cpu'"
        )
    return known[:n]


def verify_initialised(module: nn.Module, checkpoint: CheckpointMode | tuple[str, ...]) -> None:
    """Raise an error if lazy parameters would be checkpointed.

    Raises:
        ValueError: the names of these parameters.
    """
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy and checkpoint != "never":
        raise ValueError(
            f"parameters without a shape cannot be checkpointed, but there are {lazy}; run the module once on a "
            "sample before wrapping it, or use checkpoint='never'"
        )


def verify_threads(modules: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raise an error if modules cannot run in several threads, as each device has one.

    Every process must call collectives in the same order, and the order among threads is undefined.

    Raises:
        ValueError: there is a :class:`~torch.nn.SyncBatchNorm` or a layer in
            :class:`~torch.nn.parallel.DistributedDataParallel`, and there are several devices and processes; or a
            module was compiled in a mode that makes CUDA graphs.
    """
    n, on_accelerator = len(set(devices)), any([device.type != "cpu" for device in devices])
    in_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    for module in modules if n > 1 and (on_accelerator or in_group) else ():
        for kind, remedy in _REMEDIES.items() if in_group else ():
            if isinstance(module, kind):
                raise ValueError(
                    f"{kind.__name__} cannot run in a pipeline on {n} devices: each device has a thread, so the order "
                    "of collectives would differ between processes, which would wait for each other for ever; use "
                    f"{remedy}"
                )
        if on_accelerator and uses_cuda_graphs(module):
            raise ValueError(
                f"a module ({type(module).__name__}) was compiled into CUDA graphs, which PyTorch keeps for each "
                f"thread, and a pipeline on {n} devices has new threads in each call; compile it with mode='default' "
                "or mode='max-autotune-no-cudagraphs'"
            )


_REMEDIES: dict[type[nn.Module], str] = {
    nn.SyncBatchNorm: "BatchNorm, whose statistics are those of the process, and GPipe(..., deferred_batch_norm=True)",
    DistributedDataParallel: "it around the pipeline: DistributedDataParallel(GPipe(...))",
}
